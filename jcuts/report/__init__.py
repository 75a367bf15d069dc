"""Reports of `explain`: data (`report_data.py`), text, rich tables, an HTML page (`html`), comparison of two."""
