"""The draft worker: guesses how sequences go on; what it says can only change speed, never a token."""
