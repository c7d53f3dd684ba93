"""The SDK for threads, generated from `_async` by `make sdk`."""
