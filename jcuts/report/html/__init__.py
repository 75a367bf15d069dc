"""The report of ``explain`` as one self-contained HTML page: inline SVG and CSS, no scripts, nothing from a network."""
