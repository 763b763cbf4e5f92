//! Cache of a metrics page in other encodings: gzip, or delimited protobuf.
//!
//! Each encoding is made from the text page on request, and kept as long as that page is the newest.

use std::{io::Write, time::Duration};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};

use super::single_flight_cache::SingleFlightCache;
use berth_metrics::{exposition::ExpositionFormat, text_parser};
use berth_sys::blocking_pool::BlockingPool;

/// Timeout of one encoding.
const LIMIT: Duration = Duration::from_secs(10);

/// `Content-Encoding`: gzip or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageCompression {
    /// Uncompressed.
    No,
    /// Compressed by gzip.
    Gzip,
}

/// Cached encodings of one page.
pub struct EncodingCache {
    zipped: SingleFlightCache<(Bytes, Bytes)>,
    delimited: SingleFlightCache<(Bytes, Bytes)>,
    both: SingleFlightCache<(Bytes, Bytes)>,
}

impl EncodingCache {
    /// Creates an empty cache; each encoding is kept for at most `keep`.
    pub fn new(keep: Duration) -> Self {
        Self {
            zipped: SingleFlightCache::new(keep),
            delimited: SingleFlightCache::new(keep),
            both: SingleFlightCache::new(keep),
        }
    }

    /// Returns the page in that encoding; empty if it cannot be made within its timeout.
    pub async fn of(
        &self,
        page: Bytes,
        format: ExpositionFormat,
        compressed: PageCompression,
        pool: &BlockingPool,
    ) -> Bytes {
        let memo = match (format, compressed) {
            (ExpositionFormat::Text(_), PageCompression::No) => return page,
            (ExpositionFormat::Text(_), PageCompression::Gzip) => &self.zipped,
            (ExpositionFormat::Delimited(_), PageCompression::No) => &self.delimited,
            (ExpositionFormat::Delimited(_), PageCompression::Gzip) => &self.both,
        };
        if let Some((source, encoded)) = memo.cached(Duration::MAX)
            && source.as_ptr() == page.as_ptr()
        {
            return encoded;
        }
        let pool = pool.clone();
        let work = || async move {
            let source = page.clone();
            let encoded = pool.run_within(LIMIT, move || encode(&page, format, compressed)).await;
            (source, encoded.unwrap_or_default())
        };
        memo.fresh(Duration::ZERO, work).await.map(|(_, encoded)| encoded).unwrap_or_default()
    }
}

fn encode(page: &[u8], format: ExpositionFormat, compressed: PageCompression) -> Bytes {
    let mut out = page.to_vec();
    if matches!(format, ExpositionFormat::Delimited(_)) {
        format.encode(text_parser::families(&String::from_utf8_lossy(page)), &mut out);
    }
    self::compressed(out.into(), compressed)
}

/// Compresses a page if requested; empty if compression fails.
pub fn compressed(page: Bytes, compressed: PageCompression) -> Bytes {
    match compressed {
        PageCompression::No => page,
        PageCompression::Gzip => zip(&page).unwrap_or_default().into(),
    }
}

fn zip(page: &[u8]) -> std::io::Result<Vec<u8>> {
    // Speed matters more than size, since the page is read once: the fast level halves it already.
    let mut encoder = GzEncoder::new(Vec::with_capacity(page.len() / 8), Compression::fast());
    encoder.write_all(page)?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[tokio::test]
    async fn a_page_comes_in_every_form() {
        let (encoded, pool) = (EncodingCache::new(Duration::from_secs(60)), BlockingPool::new("statistics", 4));
        let page = Bytes::from_static(b"# HELP a A\n# TYPE a gauge\na 1\n");
        let text = ExpositionFormat::negotiate(None);
        assert_eq!(encoded.of(page.clone(), text, PageCompression::No, &pool).await.as_ptr(), page.as_ptr());
        let zipped = encoded.of(page.clone(), text, PageCompression::Gzip, &pool).await;
        let mut plain = Vec::new();
        GzDecoder::new(&*zipped).read_to_end(&mut plain).expect("whole");
        assert_eq!(plain, page);
        let again = encoded.of(page.clone(), text, PageCompression::Gzip, &pool).await;
        assert_eq!(again.as_ptr(), zipped.as_ptr(), "made once");
        let newer = encoded.of(Bytes::from_static(b"b 1\n"), text, PageCompression::Gzip, &pool).await;
        assert_ne!(newer, zipped);
        let delimited = ExpositionFormat::Delimited(berth_metrics::exposition::EscapingScheme::Underscores);
        let message = encoded.of(page, delimited, PageCompression::No, &pool).await;
        assert_eq!(
            &message[..3],
            &[u8::try_from(message.len() - 1).expect("small"), 0x0a, 1],
            "its length, then the name"
        );
    }
}
