//! SPDY/3 zlib dictionary for header compression. Pure.
//!
//! A list of words, each preceded by its length as a 32-bit number, followed by a list of values. Both peers need the
//! same 1423 bytes; every compressed stream contains their checksum.

use std::sync::LazyLock;

const WORDS: &str = "options head post put delete trace accept accept-charset accept-encoding accept-language \
     accept-ranges age allow authorization cache-control connection content-base content-encoding content-language \
     content-length content-location content-md5 content-range content-type date etag expect expires from host \
     if-match if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards \
     pragma proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding \
     upgrade user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public \
     set-cookie keep-alive origin";

const TAIL: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505\
     203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized\
     403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable\
     Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT\
     chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,\
     text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

/// Bytes of the dictionary.
pub(super) static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut bytes = Vec::with_capacity(1423);
    for word in WORDS.split(' ') {
        let length = u8::try_from(word.len()).unwrap_or(u8::MAX); // all are shorter
        bytes.extend_from_slice(&[0, 0, 0, length]);
        bytes.extend(word.bytes().map(|b| if b == b'_' { b' ' } else { b }));
    }
    bytes.extend_from_slice(TAIL.as_bytes());
    bytes
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_is_that_of_everybody() {
        let (mut a, mut b) = (1u32, 0u32);
        for byte in DICTIONARY.iter() {
            a = (a + u32::from(*byte)) % 65521;
            b = (b + a) % 65521;
        }
        assert_eq!((DICTIONARY.len(), (b << 16) | a), (1423, 0xe3c6_a7c2));
    }
}
