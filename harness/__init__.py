"""What a run needs and the story in train_gsm8k.py does not: its folder, checkpoints, instruments, pictures and the small policy."""
