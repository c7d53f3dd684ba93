"""The SDK for asyncio, written by hand."""
