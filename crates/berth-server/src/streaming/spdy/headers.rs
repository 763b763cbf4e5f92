//! SPDY header blocks: encoding, zlib compression, and size limits. Pure.
//!
//! Each direction has one compressor for the life of the connection; therefore every block must pass through it in wire
//! order, even one whose content is ignored. The size of decompressed blocks is limited (spec 04b §3).

use bytes::{Buf, BufMut, BytesMut};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress};

use super::{SpdyError, dictionary::DICTIONARY};

/// Maximum number of headers per block.
const HEADERS: usize = 64;
/// Maximum length of a name or value, in bytes.
const FIELD: usize = 8 << 10;
/// Maximum decompressed size of a block in bytes: enough for [`HEADERS`] headers of ordinary size.
const UNPACKED: usize = 128 << 10;
/// Window of our compressor as a power of two: the dictionary and a few blocks.
const WINDOW_BITS: u8 = 12;

/// Headers of a stream; names are lower-case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, String)>);

impl Headers {
    /// Creates headers; names are converted to lower case.
    pub fn of(pairs: &[(&str, &str)]) -> Self {
        Self(pairs.iter().map(|(name, value)| (name.to_ascii_lowercase(), (*value).to_owned())).collect())
    }

    /// First value of a header, which may be empty; `None` where the header is missing.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name)?;
        value.split('\0').next()
    }

    /// Number of headers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no headers.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn write(&self) -> Vec<u8> {
        let mut block = Vec::new();
        let length = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // our headers are short
        block.put_u32(length(self.0.len()));
        for text in self.0.iter().flat_map(|(name, value)| [name, value]) {
            block.put_u32(length(text.len()));
            block.put_slice(text.as_bytes());
        }
        block
    }

    fn read(mut block: &[u8]) -> Result<Self, SpdyError> {
        let count = block.try_get_u32().map_err(|_| SpdyError::Headers("header count is missing"))? as usize;
        if count > HEADERS {
            return Err(SpdyError::Headers("too many headers"));
        }
        let mut headers = Vec::with_capacity(count);
        for _ in 0..count {
            let (name, value) = (field(&mut block)?, field(&mut block)?);
            if name.is_empty() || name.bytes().any(|b| b.is_ascii_uppercase()) {
                return Err(SpdyError::Headers("header name is empty or not lower-case"));
            }
            if headers.iter().any(|(known, _)| *known == name) {
                return Err(SpdyError::Headers("duplicate header name"));
            }
            headers.push((name, value));
        }
        if block.is_empty() {
            Ok(Self(headers))
        } else {
            Err(SpdyError::Headers("unexpected data after the last header"))
        }
    }
}

fn field(block: &mut &[u8]) -> Result<String, SpdyError> {
    let length = block.try_get_u32().map_err(|_| SpdyError::Headers("unexpected end of header block"))? as usize;
    if length > FIELD {
        return Err(SpdyError::Headers("header name or value too long"));
    }
    let (text, rest) = block.split_at_checked(length).ok_or(SpdyError::Headers("unexpected end of header block"))?;
    *block = rest;
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// Compressor of our header blocks.
pub(super) struct Packer(Compress);

impl Packer {
    pub(super) fn new() -> Self {
        let mut compress = Compress::new_with_window_bits(Compression::fast(), true, WINDOW_BITS);
        // A new compressor accepts any dictionary; without it the peer would reject the first block.
        let _ = compress.set_dictionary(&DICTIONARY);
        Self(compress)
    }

    /// Appends the compressed headers.
    pub(super) fn pack(&mut self, headers: &Headers, out: &mut BytesMut) -> Result<(), SpdyError> {
        let block = headers.write();
        let mut rest = block.as_slice();
        let mut chunk = [0; 1024];
        loop {
            let (before_in, before_out) = (self.0.total_in(), self.0.total_out());
            let done = self.0.compress(rest, &mut chunk, FlushCompress::Sync);
            done.map_err(|_| SpdyError::Headers("compression failed"))?;
            let (taken, made) = (count(before_in, self.0.total_in()), count(before_out, self.0.total_out()));
            out.extend_from_slice(chunk.get(..made).unwrap_or_default());
            rest = rest.get(taken..).unwrap_or_default();
            if rest.is_empty() && made < chunk.len() {
                return Ok(());
            }
        }
    }
}

/// Decompressor of the peer's header blocks.
pub(super) struct Unpacker(Decompress);

impl Unpacker {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }

    pub(super) fn unpack(&mut self, packed: &[u8]) -> Result<Headers, SpdyError> {
        let mut block = Vec::new();
        let mut rest = packed;
        let mut chunk = [0; 4096];
        loop {
            let (before_in, before_out) = (self.0.total_in(), self.0.total_out());
            let done = self.0.decompress(rest, &mut chunk, FlushDecompress::Sync);
            let (taken, made) = (count(before_in, self.0.total_in()), count(before_out, self.0.total_out()));
            rest = rest.get(taken..).unwrap_or_default();
            block.extend_from_slice(chunk.get(..made).unwrap_or_default());
            if block.len() > UNPACKED {
                return Err(SpdyError::Headers("header block too large"));
            }
            match done {
                Ok(_) if taken == 0 && made == 0 => break,
                Ok(_) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    let set = self.0.set_dictionary(&DICTIONARY);
                    set.map_err(|_| SpdyError::Headers("unknown compression dictionary"))?;
                }
                // A call without input and output is no error of the stream.
                Err(_) if rest.is_empty() && taken == 0 && !block.is_empty() => break,
                Err(_) => return Err(SpdyError::Headers("decompression failed")),
            }
        }
        Headers::read(&block)
    }
}

/// Difference of two totals; within one call it is less than any buffer size.
fn count(before: u64, after: u64) -> usize {
    usize::try_from(after.saturating_sub(before)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_survive_the_way_in_order() {
        let (mut packer, mut unpacker) = (Packer::new(), Unpacker::new());
        let long = "x".repeat(FIELD);
        for headers in [
            Headers::of(&[("streamType", "error")]),
            Headers::of(&[]),
            Headers::of(&[("streamtype", "data"), ("port", "8080"), ("requestID", "0")]),
            Headers::of(&[("a", &long), ("b", "")]),
            Headers::of(&[("streamtype", "error")]),
        ] {
            let mut packed = BytesMut::new();
            packer.pack(&headers, &mut packed).expect("packed");
            assert_eq!(unpacker.unpack(&packed), Ok(headers));
        }
        let headers = Headers::of(&[("streamType", "data\0error"), ("empty", "")]);
        assert_eq!((headers.get("streamtype"), headers.get("empty"), headers.get("x")), (Some("data"), Some(""), None));
        assert_eq!((headers.len(), headers.is_empty()), (2, false));
    }

    #[test]
    fn what_a_peer_may_not_send() {
        fn block(count: u32, fields: &[(&[u8], &[u8])]) -> Vec<u8> {
            let mut block = count.to_be_bytes().to_vec();
            for field in fields.iter().flat_map(|(name, value)| [name, value]) {
                block.extend_from_slice(&u32::try_from(field.len()).expect("short").to_be_bytes());
                block.extend_from_slice(field);
            }
            block
        }
        let long = vec![b'x'; FIELD + 1];
        let rows = [
            (vec![0, 0, 0], "header count is missing"),
            (block(65, &[]), "too many headers"),
            (block(1, &[]), "unexpected end of header block"),
            (block(1, &[(b"a", &long)]), "header name or value too long"),
            (block(1, &[(b"A", b"")]), "header name is empty or not lower-case"),
            (block(1, &[(b"", b"x")]), "header name is empty or not lower-case"),
            (block(2, &[(b"a", b"1"), (b"a", b"2")]), "duplicate header name"),
            (block(0, &[(b"a", b"1")]), "unexpected data after the last header"),
            ([block(1, &[]), vec![0xff; 4]].concat(), "header name or value too long"),
        ];
        for (bytes, why) in rows {
            assert_eq!(Headers::read(&bytes), Err(SpdyError::Headers(why)));
        }
    }

    #[test]
    fn a_bomb_is_not_unpacked() {
        let mut compress = Compress::new_with_window_bits(Compression::best(), true, 15);
        compress.set_dictionary(&DICTIONARY).expect("fresh");
        let mut packed = Vec::with_capacity(64 << 10);
        let zeros = vec![0; 8 << 20];
        compress.compress_vec(&zeros, &mut packed, FlushCompress::Sync).expect("packed");
        assert_eq!(Unpacker::new().unpack(&packed), Err(SpdyError::Headers("header block too large")));
        assert_eq!(Unpacker::new().unpack(b"nothing of the kind"), Err(SpdyError::Headers("decompression failed")));
        let mut plain = Vec::with_capacity(1 << 10);
        let mut without = Compress::new(Compression::fast(), true);
        without.compress_vec(&[0; 4], &mut plain, FlushCompress::Sync).expect("packed");
        assert_eq!(Unpacker::new().unpack(&plain), Ok(Headers::default()), "the dictionary need not be used");
    }
}
