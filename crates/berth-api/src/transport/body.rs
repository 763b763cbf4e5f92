//! Size-limited reader of HTTP response bodies, with gzip decompression.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::GzDecoder;
use http::{HeaderMap, header::CONTENT_ENCODING};
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::connection::chain;
use crate::api::ApiError;

/// Buffer with a size limit.
struct LimitedBuffer {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for LimitedBuffer {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(piece.len()) > self.limit {
            return Err(io::Error::other(TooLarge));
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("too large")]
struct TooLarge;

enum Sink {
    Plain(LimitedBuffer),
    Packed(Box<GzDecoder<LimitedBuffer>>),
}

impl Sink {
    fn new(headers: &HeaderMap, limit: usize) -> Result<Self, ApiError> {
        let limited = LimitedBuffer { bytes: Vec::new(), limit };
        match headers.get(CONTENT_ENCODING).map(|value| value.as_bytes().to_ascii_lowercase()).as_deref() {
            None | Some(b"" | b"identity") => Ok(Self::Plain(limited)),
            Some(b"gzip") => Ok(Self::Packed(Box::new(GzDecoder::new(limited)))),
            Some(other) => {
                let name = String::from_utf8_lossy(other).into_owned();
                Err(ApiError::Malformed(format!("unsupported content encoding: {name}")))
            }
        }
    }

    fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(limited) => limited.write_all(piece),
            Self::Packed(decoder) => decoder.write_all(piece),
        }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(limited) => Ok(limited.bytes),
            Self::Packed(decoder) => Ok(decoder.finish()?.bytes),
        }
    }
}

/// Reads a response body; at most `limit` bytes after decompression.
///
/// # Errors
/// The connection was lost, or the body is too large or malformed.
pub async fn read(headers: &HeaderMap, mut body: Incoming, limit: usize) -> Result<Bytes, ApiError> {
    let wrong = |error: &io::Error| {
        let is_large = error.get_ref().is_some_and(|cause| cause.is::<TooLarge>());
        let text = if is_large { format!("response exceeds {limit} bytes") } else { error.to_string() };
        ApiError::Malformed(text)
    };
    let mut sink = Sink::new(headers, limit)?;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ApiError::Lost(chain(&error)))?;
        if let Some(piece) = frame.data_ref() {
            sink.write(piece).map_err(|error| wrong(&error))?;
        }
    }
    sink.finish().map(Bytes::from).map_err(|error| wrong(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(encoding: &str, bytes: &[u8], limit: usize) -> Result<Vec<u8>, String> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, encoding.parse().expect("a value"));
        let mut sink = Sink::new(&headers, limit).map_err(|e| e.to_string())?;
        bytes.chunks(7).try_for_each(|piece| sink.write(piece)).map_err(|e| e.to_string())?;
        sink.finish().map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_packed_is_unpacked_within_the_limit() {
        let text = vec![b'x'; 10_000];
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(&text).expect("packed");
        let packed = packer.finish().expect("packed");
        assert_eq!(unpacked("gzip", &packed, 10_000), Ok(text.clone()));
        assert_eq!(unpacked("gzip", &packed, 9_999), Err("too large".to_owned()), "a bomb");
        assert_eq!(unpacked("identity", &text, 10_000), Ok(text.clone()));
        assert_eq!(unpacked("", &text, 9_999), Err("too large".to_owned()));
        assert_eq!(unpacked("br", &text, 10_000), Err("unsupported content encoding: br".to_owned()));
        assert!(unpacked("gzip", b"no such thing at all", 10_000).is_err());
        assert!(unpacked("gzip", &packed[..packed.len() - 9], 10_000).is_err(), "cut");
    }
}
