//! Detects the compression of a layer or archive by magic number, and decompresses it.
//!
//! Media types may be wrong; magic numbers are not. Implements spec 09b §5.2, §7.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

use super::error::{ImageError, IoContext};

/// Log2 of the maximum zstd window size: 128 MiB.
const WINDOW_LOG: u32 = 27;
/// Buffer for compressed input, bytes.
const BUFFER: usize = 128 << 10;

/// A compression format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compression {
    /// Uncompressed.
    Plain,
    /// gzip, any number of members.
    Gzip,
    /// zstd, any number of frames.
    Zstd,
}

impl Compression {
    /// Detects the format by the first bytes.
    ///
    /// # Errors
    /// The format is known and not supported (bzip2, xz).
    pub fn of(head: &[u8]) -> Result<Self, ImageError> {
        let refused = |name| Err(ImageError::bad_content(format!("compression {name} is not supported")));
        match head {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            // Skippable frames may come first.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => refused("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => refused("xz"),
            _ => Ok(Self::Plain),
        }
    }
}

/// A decompressed stream.
pub enum Decompressor<R: Read> {
    /// Uncompressed input.
    Plain(BufReader<R>),
    /// gzip input.
    Gzip(Box<MultiGzDecoder<BufReader<R>>>),
    /// zstd input.
    Zstd(Box<zstd::Decoder<'static, BufReader<R>>>),
}

impl<R: Read> Decompressor<R> {
    /// Detects the compression of a stream and decompresses it on read.
    ///
    /// # Errors
    /// The stream cannot be read, or its compression is not supported.
    pub fn new(inner: R) -> Result<Self, ImageError> {
        let mut inner = BufReader::with_capacity(BUFFER, inner);
        let head = inner.fill_buf().attempt("read archive")?;
        Ok(match Compression::of(head)? {
            Compression::Plain => Self::Plain(inner),
            Compression::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(inner))),
            Compression::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(inner).attempt("unpack zstd")?;
                decoder.window_log_max(WINDOW_LOG).attempt("unpack zstd")?;
                Self::Zstd(Box::new(decoder))
            }
        })
    }

    /// The underlying reader.
    pub fn packed(&self) -> &R {
        match self {
            Self::Plain(inner) => inner.get_ref(),
            Self::Gzip(inner) => inner.get_ref().get_ref(),
            Self::Zstd(inner) => inner.get_ref().get_ref(),
        }
    }

    /// Returns the underlying reader at its current position.
    pub fn into_packed(self) -> R {
        match self {
            Self::Plain(inner) => inner.into_inner(),
            Self::Gzip(inner) => inner.into_inner().into_inner(),
            Self::Zstd(inner) => inner.finish().into_inner(),
        }
    }
}

impl<R: Read> Read for Decompressor<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(inner) => inner.read(buffer),
            Self::Gzip(inner) => inner.read(buffer),
            Self::Zstd(inner) => inner.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    pub fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    }

    #[test]
    fn compression_is_detected_by_magic_number() {
        let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).expect("in memory");
        for (what, packed) in [
            ("plain", b"hello world".to_vec()),
            ("gzip", gzip(b"hello world")),
            ("gzip of two members", [gzip(b"hello "), gzip(b"world")].concat()),
            ("zstd", zstd(b"hello world")),
            ("zstd of two frames", [zstd(b"hello "), zstd(b"world")].concat()),
        ] {
            let mut out = String::new();
            Decompressor::new(&packed[..]).expect(what).read_to_string(&mut out).expect(what);
            assert_eq!(out, "hello world", "{what}");
        }
        for (head, name) in [(&b"BZh91AY"[..], "bzip2"), (b"\xfd7zXZ\0", "xz")] {
            let Err(error) = Decompressor::new(head) else { panic!("{name} is refused") };
            assert!(error.text.contains(name), "{error}");
        }
    }
}
