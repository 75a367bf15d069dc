"""Commands about results that travel: building artefacts, showing what one holds, tuning into files to check in."""
