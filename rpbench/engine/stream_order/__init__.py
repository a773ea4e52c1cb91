"""The order of work on streams, recorded on CPU tensors and checked: no wait may be missing on any accelerator."""
