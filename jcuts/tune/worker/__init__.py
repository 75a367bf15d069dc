"""The measuring process: reads requests (compile, reference, check, measure) and answers; a crash costs no user
process.
"""
