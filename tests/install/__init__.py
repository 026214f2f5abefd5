"""What an installation contains and what it needs: the wheel, its extras, and the packages beside it."""
