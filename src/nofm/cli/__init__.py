"""The command line. Nothing here imports torch before the arguments have been read and found right."""
