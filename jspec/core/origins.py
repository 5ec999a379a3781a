"""Token origins: the values of `Output.origins`, with their names and colours."""

PADDING, ACCEPTED, CORRECTED, BONUS, NO_DRAFT = 0, 1, 2, 3, 4

NAMES = {ACCEPTED: "accepted", CORRECTED: "corrected", BONUS: "bonus", NO_DRAFT: "no draft"}
COLOURS = {ACCEPTED: "green", CORRECTED: "bold red", BONUS: "cyan", NO_DRAFT: "yellow"}
# The possible outcomes of a draft position.
NO_GUESS, REFUSED, KEPT = 0, 1, 2
