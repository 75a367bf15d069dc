"""Reports of `explain`: report data, text, HTML (`function_report.py`) and rich tables."""
