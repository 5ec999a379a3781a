"""The origins of tokens: the values of `Output.origins`, their names and their colours."""

PADDING, ACCEPTED, CORRECTED, BONUS, NO_DRAFT = 0, 1, 2, 3, 4

NAMES = {ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus", NO_DRAFT: "no draft"}
COLOURS = {ACCEPTED: "green", CORRECTED: "bold red", BONUS: "cyan", NO_DRAFT: "yellow"}
# The outcome of a draft token.
NO_GUESS, REFUSED, KEPT = 0, 1, 2
