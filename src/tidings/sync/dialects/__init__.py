"""
One module a dialect: messages in, requests out; answers in, messages out. Nothing here decides or remembers.

``seed`` is the protocol's own dialect (A), ``projects`` that of the JavaScript client 2.1.0 (B), ``legacy`` of 1.3.0 (C).
"""
