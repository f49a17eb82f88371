"""Use a trained model: export it for devices, type with it, and personalize it for one user.

Modules:

    model           open a run folder, an export or a personal model, and predict with it; an export without torch
    step            one step of a trained model in torch
    export          write a run's model as ONNX in float32 and int8, after comparing it with the trained model
    card            the model card: README.md beside a model, with its claim, accuracy and privacy report
    language_model  write a fine-tuned Hugging Face model as an adapter, as a whole model or as GGUF
    hub             write a folder for the Hugging Face hub
    personalize     continue training on one user's own text, for that user only
    keyboard/       a phone keyboard on a local web page that shows the suggestions

Example:

    from unheard.deployment.model import open_model

    open_model("runs/private").predict("see you", top=3)        # [('tomorrow', 0.21), ...]
"""
