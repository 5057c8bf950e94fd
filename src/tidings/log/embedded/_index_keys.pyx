# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""
The keys of the index, compiled: fingerprints, and what a batch of entries comes to.

Optional: where it could not be built, ``index`` does the same in Python. A test holds the two together.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from .index import check_place, fingerprint_py, idem_scope

cdef enum:
    BLOCK_BYTES = 128
    OFFSET_BITS = 40

cdef uint64_t[8] IV = [
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
]
cdef unsigned char[12][16] SIGMA = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
    [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
    [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
    [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
    [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
    [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
    [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
    [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
]


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept nogil:
    return word >> bits | word << (64 - bits)


cdef inline void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) noexcept nogil:
    v[a] = v[a] + v[b] + x
    v[d] = rotated(v[d] ^ v[a], 32)
    v[c] = v[c] + v[d]
    v[b] = rotated(v[b] ^ v[c], 24)
    v[a] = v[a] + v[b] + y
    v[d] = rotated(v[d] ^ v[a], 16)
    v[c] = v[c] + v[d]
    v[b] = rotated(v[b] ^ v[c], 63)


cdef uint64_t blake2b(const unsigned char *block, Py_ssize_t size) noexcept nogil:
    """BLAKE2b (RFC 7693) with a digest of eight bytes, of at most one block, which is filled up with zeros."""
    cdef uint64_t[16] v
    cdef uint64_t[16] m
    cdef const unsigned char *s
    cdef const unsigned char *at = block
    cdef int n
    for n in range(16):
        m[n] = (
            <uint64_t>at[0] | <uint64_t>at[1] << 8 | <uint64_t>at[2] << 16 | <uint64_t>at[3] << 24
            | <uint64_t>at[4] << 32 | <uint64_t>at[5] << 40 | <uint64_t>at[6] << 48 | <uint64_t>at[7] << 56
        )
        at += 8
    for n in range(8):
        v[n] = v[n + 8] = IV[n]
    v[0] ^= 0x01010008  # one leaf, no key, eight bytes
    v[12] ^= <uint64_t>size
    v[14] = ~v[14]  # the last block
    for n in range(12):
        s = SIGMA[n]
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]])
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]])
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]])
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]])
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]])
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]])
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]])
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]])
    return IV[0] ^ 0x01010008 ^ v[0] ^ v[8]


def fingerprint(bytes scope not None, str text not None):
    """See ``index.fingerprint_py``."""
    cdef Py_ssize_t text_size
    cdef Py_ssize_t scope_size = PyBytes_GET_SIZE(scope)
    cdef const char *data
    try:
        data = PyUnicode_AsUTF8AndSize(text, &text_size)
    except UnicodeEncodeError:
        return fingerprint_py(scope, text)
    if scope_size + text_size > BLOCK_BYTES:
        return fingerprint_py(scope, text)
    cdef unsigned char[BLOCK_BYTES] block
    memset(block, 0, BLOCK_BYTES)
    memcpy(block, PyBytes_AS_STRING(scope), scope_size)
    memcpy(block + scope_size, data, text_size)
    cdef uint64_t digest = blake2b(block, scope_size + text_size)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, 8)
    cdef unsigned char *out = <unsigned char *>PyBytes_AS_STRING(key)
    cdef int n
    for n in range(8):
        out[n] = <unsigned char>(digest >> (8 * n) & 255)
    return key


cdef inline void put_word(unsigned char *at, uint64_t word) noexcept nogil:
    cdef int n
    for n in range(8):
        at[n] = <unsigned char>(word >> (56 - 8 * n) & 255)


def collect_keys(entries, dict numbers not None, list ids not None, list idem not None, dict partitions not None):
    """See ``index.collect_keys_py``."""
    cdef uint64_t seq, offset
    cdef bytes place, key
    cdef unsigned char *at
    for entry in entries:
        try:
            seq = entry.seq
            offset = entry.offset
        except OverflowError:
            check_place(entry.seq, entry.offset)
            raise
        if seq == 0 or offset >> OFFSET_BITS:
            check_place(entry.seq, entry.offset)
        topic = entry.topic
        number = numbers.get(topic)
        if number is None:
            continue
        place = PyBytes_FromStringAndSize(NULL, 16)
        at = <unsigned char *>PyBytes_AS_STRING(place)
        put_word(at, seq)
        put_word(at + 8, <uint64_t>number << OFFSET_BITS | offset)
        text = entry.event_id
        if text is not None:
            key = fingerprint(b"", text)
            (<list>ids[<unsigned char>PyBytes_AS_STRING(key)[0]]).append(key + place)
        text = entry.idem_key
        if text is not None:
            key = fingerprint(idem_scope(topic, entry.space_id), text)
            (<list>idem[<unsigned char>PyBytes_AS_STRING(key)[0]]).append(key + place)
        for name in <tuple>entry.partitions:
            places = partitions.get(name)
            if places is None:
                partitions[name] = [place]
            else:
                (<list>places).append(place)
