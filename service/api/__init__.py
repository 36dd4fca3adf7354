"""The service over HTTP: what it takes and answers, who may ask, events, workers, pages."""
