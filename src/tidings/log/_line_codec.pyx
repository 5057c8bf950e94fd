# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""
``line_codec``, compiled: the bytes of a line are put where they belong at once, instead of joined from parts.

Optional: where it could not be built, ``line_codec`` does the same in Python. A test holds the two together.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from os import urandom

from .line_codec import encode_record_line_py

cdef extern from "Python.h":
    str PyUnicode_New(Py_ssize_t size, Py_UCS4 highest)
    void *PyUnicode_1BYTE_DATA(object text)

cdef enum:
    NUMBER_BYTES_MAX = 20
    SECOND_BYTES = 20  # 2026-01-01T00:00:00.

cdef int64_t US_MAX = 253402300800000000  # the year 10000

cdef uint32_t[8][256] TABLES


cdef void make_tables() noexcept:
    """CRC-32 of each byte, as it is and with one to seven zero bytes behind it."""
    cdef uint32_t crc
    cdef int n, k
    for n in range(256):
        crc = <uint32_t>n
        for k in range(8):
            crc = (crc >> 1) ^ (0xEDB88320u if crc & 1 else 0)
        TABLES[0][n] = crc
    for n in range(256):
        for k in range(1, 8):
            crc = TABLES[k - 1][n]
            TABLES[k][n] = TABLES[0][crc & 255] ^ (crc >> 8)


make_tables()


cdef uint32_t crc32(const unsigned char *at, Py_ssize_t size) noexcept nogil:
    """As ``zlib.crc32``, eight bytes at a time."""
    cdef uint32_t crc = 0xFFFFFFFFu
    while size >= 8:
        # Put together byte by byte, which is one load where bytes come lowest first, and right where they do not.
        crc ^= <uint32_t>at[0] | <uint32_t>at[1] << 8 | <uint32_t>at[2] << 16 | <uint32_t>at[3] << 24
        crc = (
            TABLES[7][crc & 255] ^ TABLES[6][crc >> 8 & 255] ^ TABLES[5][crc >> 16 & 255] ^ TABLES[4][crc >> 24]
            ^ TABLES[3][at[4]] ^ TABLES[2][at[5]] ^ TABLES[1][at[6]] ^ TABLES[0][at[7]]
        )
        at += 8
        size -= 8
    while size > 0:
        crc = TABLES[0][(crc ^ at[0]) & 255] ^ (crc >> 8)
        at += 1
        size -= 1
    return ~crc


cdef inline char *put(char *at, const char *text, Py_ssize_t size) noexcept nogil:
    memcpy(at, text, size)
    return at + size


cdef inline char *put_bytes(char *at, bytes text) noexcept:
    return put(at, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef char *put_number(char *at, uint64_t number) noexcept nogil:
    cdef char[NUMBER_BYTES_MAX] digits
    cdef int first = NUMBER_BYTES_MAX
    while True:
        first -= 1
        digits[first] = <char>(48 + number % 10)
        number //= 10
        if number == 0:
            return put(at, &digits[first], NUMBER_BYTES_MAX - first)


cdef inline void put_digits(char *at, int64_t number, int count) noexcept nogil:
    while count > 0:
        count -= 1
        at[count] = <char>(48 + number % 10)
        number //= 10


# The second's text is kept from call to call: a log writes many records within one.
cdef int64_t known_second = -1
cdef char[SECOND_BYTES] second_text
memcpy(second_text, b"0000-00-00T00:00:00.", SECOND_BYTES)


cdef void format_second(int64_t second) noexcept:
    global known_second
    cdef int64_t of_day = second % 86400
    # Days are counted from 1 March of the year 0, so that the leap day is a year's last.
    cdef int64_t days = second // 86400 + 719468
    cdef int64_t era = days // 146097
    cdef int64_t of_era = days % 146097
    cdef int64_t year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    cdef int64_t of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    cdef int64_t month_from_march = (5 * of_year + 2) // 153
    cdef int64_t month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    put_digits(second_text, era * 400 + year_of_era + (1 if month <= 2 else 0), 4)
    put_digits(second_text + 5, month, 2)
    put_digits(second_text + 8, of_year - (153 * month_from_march + 2) // 5 + 1, 2)
    put_digits(second_text + 11, of_day // 3600, 2)
    put_digits(second_text + 14, of_day // 60 % 60, 2)
    put_digits(second_text + 17, of_day % 60, 2)
    known_second = second


cdef inline bint is_plain(const unsigned char *text, Py_ssize_t size) noexcept nogil:
    """Whether a text stands in JSON as it is."""
    cdef Py_ssize_t n
    for n in range(size):
        if text[n] < 32 or text[n] == 34 or text[n] == 92 or text[n] >= 127:
            return False
    return True


cdef inline void put_hex(char *at, uint64_t number) noexcept nogil:
    """Sixteen digits."""
    cdef int n
    for n in range(15, -1, -1):
        at[n] = b"0123456789abcdef"[number & 15]
        number >>= 4


cdef enum:
    POOL_BYTES = 4096


cdef class LogIdMaker:
    """See ``core.ids.LogIdMaker``."""

    cdef object random_bytes
    cdef bytes pool
    cdef Py_ssize_t at

    def __init__(self, random_bytes=urandom):
        self.random_bytes = random_bytes
        self.pool = b""
        self.at = POOL_BYTES

    def make(self, uint64_t seq):
        """A new id for the record at ``seq``; another one each time."""
        cdef int n
        cdef uint64_t own = 0
        if self.at >= POOL_BYTES:
            self.pool = self.random_bytes(POOL_BYTES)
            if len(self.pool) != POOL_BYTES:
                raise ValueError("too few random bytes")
            self.at = 0
        cdef const unsigned char *drawn = <const unsigned char *>PyBytes_AS_STRING(self.pool) + self.at
        for n in range(8):
            own = own << 8 | drawn[n]
        self.at += 8
        cdef str made = PyUnicode_New(35, 127)
        cdef char *text = <char *>PyUnicode_1BYTE_DATA(made)
        memcpy(text, b"ev-", 3)
        put_hex(text + 3, own)
        put_hex(text + 19, seq ^ own)
        return made


def holds_null(bytes json not None):
    """See ``line_codec.find_null``."""
    cdef const unsigned char *text = <const unsigned char *>PyBytes_AS_STRING(json)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(json)
    cdef Py_ssize_t at = 3
    # The letter at its end says how far the word may be moved on (Horspool).
    while at < size:
        if text[at] == c"l":
            if text[at - 1] == c"l" and text[at - 2] == c"u" and text[at - 3] == c"n":
                return True
            at += 1
        elif text[at] == c"u":
            at += 2
        elif text[at] == c"n":
            at += 3
        else:
            at += 4
    return False


def encode_record_line(
    int64_t offset, int64_t seq, bytes before_id not None, str event_id not None, int64_t ts_us,
    bytes rest not None, bytes payload not None,
):
    """See ``line_codec.encode_record_line_py``."""
    cdef Py_ssize_t id_size, size
    cdef const char *id_text = PyUnicode_AsUTF8AndSize(event_id, &id_size)
    if offset < 0 or seq < 0 or ts_us < 0 or ts_us >= US_MAX or not is_plain(<const unsigned char *>id_text, id_size):
        return encode_record_line_py(offset, seq, before_id, event_id, ts_us, rest, payload)
    cdef char[18 + 2 * NUMBER_BYTES_MAX] places
    cdef char *at = put(places, b'"offset":', 9)
    at = put_number(at, <uint64_t>offset)
    at = put(at, b',"seq":', 7)
    at = put_number(at, <uint64_t>seq)
    cdef Py_ssize_t places_size = at - places
    size = (
        18 + places_size + PyBytes_GET_SIZE(before_id) + 1 + id_size + 8 + SECOND_BYTES + 8
        + PyBytes_GET_SIZE(rest) + 12 + PyBytes_GET_SIZE(payload) + 2
    )
    cdef int64_t second = ts_us // 1000000
    if second != known_second:
        format_second(second)
    cdef bytes line = PyBytes_FromStringAndSize(NULL, size)
    cdef char *start = PyBytes_AS_STRING(line)
    at = put(start, b'{"crc":"00000000",', 18)
    at = put(at, places, places_size)
    at = put_bytes(at, before_id)
    at[0] = 34
    at = put(at + 1, id_text, id_size)
    at = put(at, b'","ts":"', 8)
    at = put(at, second_text, SECOND_BYTES)
    put_digits(at, ts_us % 1000000, 6)
    at = put(at + 6, b'Z"', 2)
    at = put_bytes(at, rest)
    at = put(at, b'},"payload":', 12)
    at = put_bytes(at, payload)
    at[0] = 125
    at[1] = 10
    cdef uint32_t crc = crc32(<unsigned char *>start + 18, size - 19)
    cdef int n
    for n in range(8):
        start[8 + n] = b"0123456789abcdef"[crc >> (28 - 4 * n) & 15]
    return line
