"""The primitives in C, for machines without a GPU: one ``.c`` and one launcher each, compiled at first use."""
