"""Values that flow from the cluster to an engine: InferenceService, Model, their fields, sources and records. Pure."""
