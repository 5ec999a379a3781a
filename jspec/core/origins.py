"""Where a token came from: the values of `Output.origins`, what they are called, and their colours."""

PADDING, ACCEPTED, CORRECTED, BONUS, NO_DRAFT = 0, 1, 2, 3, 4

NAMES = {ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus", NO_DRAFT: "no draft"}
COLOURS = {ACCEPTED: "green", CORRECTED: "bold red", BONUS: "cyan", NO_DRAFT: "yellow"}
# What became of a guess.
NO_GUESS, REFUSED, KEPT = 0, 1, 2
