//! Decompressed stream of a layer, with a count of the compressed bytes consumed.
//!
//! Decompression takes longer than everything else together, so it can run ahead in a thread of its own:
//! ```text
//!  compressed ─► decompress ──four chunks──► digest, read, write
//!                         ◄──used buffers───
//! ```
//! Blocking. Implements spec 09b §5.2.

use std::{
    io::{self, Read},
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread,
};

use crate::images::{
    compression::Decompressor,
    error::{ImageError, IoContext},
};

/// Chunks queued ahead of the reader: they fit into a processor's cache.
const PIECES: usize = 4;
/// Size of a chunk, bytes.
const PIECE: usize = 256 << 10;

/// Reader of a layer after decompression that counts its compressed input.
pub trait DecompressedStream: Read {
    /// Compressed bytes consumed for the bytes read, or slightly more.
    fn packed(&self) -> u64;
}

impl DecompressedStream for Box<dyn DecompressedStream + '_> {
    fn packed(&self) -> u64 {
        (**self).packed()
    }
}

/// A reader that counts bytes.
struct CountingReader<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count = self.count.saturating_add(count as u64);
        Ok(count)
    }
}

/// Decompresses on read.
struct InlineDecoder<R: Read>(Decompressor<CountingReader<R>>);

impl<R: Read> Read for InlineDecoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> DecompressedStream for InlineDecoder<R> {
    fn packed(&self) -> u64 {
        self.0.packed().count
    }
}

/// Decompresses a stream of any known format on read.
///
/// # Errors
/// The stream cannot be read, or its compression is not supported.
pub fn decompress_inline<'a, R: Read + 'a>(packed: R) -> Result<Box<dyn DecompressedStream + 'a>, ImageError> {
    Ok(Box::new(InlineDecoder(Decompressor::new(CountingReader { inner: packed, count: 0 })?)))
}

/// Decompresses ahead of the reader in a thread; an uncompressed stream needs none.
///
/// # Errors
/// As for [`decompress_inline`]; also if the thread cannot be created.
pub fn decompress_ahead<R: Read + Send + 'static>(packed: R) -> Result<Box<dyn DecompressedStream>, ImageError> {
    let here = InlineDecoder(Decompressor::new(CountingReader { inner: packed, count: 0 })?);
    if matches!(here.0, Decompressor::Plain(_)) {
        return Ok(Box::new(here));
    }
    let (to, pieces) = sync_channel(PIECES);
    let (used, buffers) = channel();
    // One buffer is with the decompressing thread, one more with the reader.
    for _ in 0..=PIECES {
        let _listens = used.send(vec![0; PIECE]);
    }
    let piece = Piece { buffer: vec![0; PIECE], length: 0, packed: 0 };
    let unpack = move || unpack(here, &buffers, &to);
    thread::Builder::new().name("decompress".to_owned()).spawn(unpack).attempt("start decompression thread")?;
    Ok(Box::new(ReadAheadDecoder { pieces, used, piece, at: 0, is_over: false }))
}

/// A chunk of the stream; an empty one is its end.
struct Piece {
    buffer: Vec<u8>,
    length: usize,
    packed: u64,
}

fn unpack(mut from: impl DecompressedStream, buffers: &Receiver<Vec<u8>>, to: &SyncSender<io::Result<Piece>>) {
    while let Ok(mut buffer) = buffers.recv() {
        let read = loop {
            match from.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        let is_last = !matches!(read, Ok(1..));
        let piece = read.map(|length| Piece { buffer, length, packed: from.packed() });
        if to.send(piece).is_err() || is_last {
            return;
        }
    }
}

/// Reads the chunks that were decompressed ahead.
struct ReadAheadDecoder {
    pieces: Receiver<io::Result<Piece>>,
    used: Sender<Vec<u8>>,
    piece: Piece,
    at: usize,
    is_over: bool,
}

impl Read for ReadAheadDecoder {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.length && !self.is_over {
            let next = self.pieces.recv().map_err(|_| io::Error::other("decompression thread exited"))??;
            let used = std::mem::replace(&mut self.piece, next);
            // The thread needs no buffer after the end of the stream.
            let _has_ended = self.used.send(used.buffer);
            (self.at, self.is_over) = (0, self.piece.length == 0);
        }
        let left = self.piece.buffer.get(self.at..self.piece.length).unwrap_or_default();
        let count = left.len().min(buffer.len());
        if let (Some(to), Some(from)) = (buffer.get_mut(..count), left.get(..count)) {
            to.copy_from_slice(from);
        }
        self.at += count;
        Ok(count)
    }
}

impl DecompressedStream for ReadAheadDecoder {
    fn packed(&self) -> u64 {
        self.piece.packed
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    }

    /// The bytes read, and the count of compressed bytes at the end.
    fn read(mut source: Box<dyn DecompressedStream + '_>) -> (Result<Vec<u8>, String>, u64) {
        let mut out = Vec::new();
        let read = source.read_to_end(&mut out).map_err(|error| error.to_string());
        (read.map(|_| out), source.packed())
    }

    #[test]
    fn a_stream_is_the_same_ahead_and_here() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8 & 15).collect();
        let cut = gzip(&bytes).split_off(0).into_iter().take(100_000).collect::<Vec<u8>>();
        let mut broken = gzip(&bytes);
        let middle = broken.len() / 2;
        broken[middle] ^= 0xff;
        broken[middle + 1] ^= 0xff;
        for (what, packed) in [
            ("plain", bytes.clone()),
            ("gzip", gzip(&bytes)),
            ("two members", [gzip(&bytes), gzip(b"more")].concat()),
            ("zstd", zstd::encode_all(&bytes[..], 1).expect("in memory")),
            ("nothing", Vec::new()),
            ("nothing, packed", gzip(b"")),
            ("cut", cut),
            ("broken", broken),
        ] {
            let here = read(decompress_inline(&packed[..]).expect(what));
            let ahead = read(decompress_ahead(io::Cursor::new(packed.clone())).expect(what));
            assert_eq!(here.0, ahead.0, "{what}");
            if here.0.is_ok() {
                assert_eq!((here.1, ahead.1), (packed.len() as u64, packed.len() as u64), "{what}");
            }
        }
    }

    #[test]
    fn what_is_ahead_is_bounded_and_ends_with_who_reads() {
        /// Signals its drop.
        struct Endless(std::sync::mpsc::Sender<()>, Box<dyn Read + Send>);
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.1.read(buffer)
            }
        }
        impl Drop for Endless {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let (ended, end) = channel();
        let member = gzip(&vec![7; 1 << 20]);
        let packed: Vec<u8> = member.iter().copied().cycle().take(member.len() * 200).collect();
        let mut source = decompress_ahead(Endless(ended, Box::new(io::Cursor::new(packed)))).expect("begun");
        let mut some = [0; 1000];
        source.read_exact(&mut some).expect("readable");
        assert_eq!(some, [7; 1000]);
        // The whole stream would be 200 MB.
        assert!(source.packed() <= (1 << 20), "{}", source.packed());
        drop(source);
        end.recv_timeout(std::time::Duration::from_secs(20)).expect("the thread has ended");
    }
}
