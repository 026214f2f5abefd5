"""Files and batches of OpenAI's API, without HTTP: lines of a file -> jobs at low priority -> lines of two files.

upload --> file_store.py: index.db and one block file each (block_file.py), sealed where the settings encrypt
                |
batch --> runner.py: one process runs a batch, under a lock that ends with the process
                |-- lines.py: bytes -> lines, checked
                |-- batch_run.py: a window of jobs, each line's with an id that follows from its number
                '-- journal.py: ended lines -> the output file and the error file, which say what a restart skips
"""

from __future__ import annotations

__all__: list[str] = []
