"""Commands about artefacts: building one ahead of time, and showing what one holds."""
