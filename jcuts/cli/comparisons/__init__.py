"""Commands that compare: a function's programs with float64 (`verify`), and one report with another (`diff`)."""
