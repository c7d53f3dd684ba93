"""The REST API and the web pages: the application, its middleware, errors and documents."""
