"""A phone keyboard on a local web page that shows what one or two models suggest.

Modules:

    server          serves the page, the suggestions and the guarantee of a model on the loopback address
    suggestions     the suggestions of a model for a text, for tokens that are words or pieces of words
    page/           HTML, CSS and JavaScript of the page

Example:

    server = KeyboardServer([Suggester(open_model("runs/private"))])
    print(server.address)
    server.serve_forever()
"""
