"""Model objects of any framework, and what stands for them at the serving boundary."""
