"""The controller: reconciles InferenceServices with supervisord's programs."""
