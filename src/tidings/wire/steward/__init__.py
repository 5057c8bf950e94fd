"""
The steward's wire, for both ends: what the client socket and ``/happenings`` carry (``requests``, ``answers``), and how it is cut into frames (``frames``).

On the Unix socket a frame is four bytes of length, big-endian, and so many bytes of UTF-8 JSON: one object. On ``/happenings`` the same
objects are WebSocket messages, without the length. A request names its operation in ``op``; fields that the operation does not have
are refused. There are no request ids: one request is worked on at a time, and answers come in the order of the requests. Each answer has
a key at its top that no other has.

A subscription turns the connection round: from its acknowledgement on only the server sends. A connection that serves a plugin is sent
``call`` frames between the answers, and says ``answer``.
"""
