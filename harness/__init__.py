"""What a run needs and the story in train_gsm8k.py does not.

Its folder, flags, checkpoints, instruments and pictures; texts, questions and the small policy.
"""
