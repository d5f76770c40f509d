"""Runs LLMKube's metal InferenceServices natively on a Mac, supervised by supervisord."""

__version__ = "0.1.0"
