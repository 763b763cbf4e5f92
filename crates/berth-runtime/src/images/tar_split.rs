//! Restores a layer's tar stream from its unpacked files, byte for byte (like tar-split).
//!
//! Compressed layers are deleted after unpacking. A recipe, recorded while the layer is read, preserves what would be
//! lost with them (order, headers, padding), but not the file content. So an image can be exported with the layers its
//! configuration names, and a layer's files can be verified against its digest at any time.
//!
//! ```text
//! zstd of: 0 │ length u32 │ bytes          literal bytes of the stream
//!          1 │ length u16 │ path │ u64     that many bytes of the file at the path
//!          2                               the end
//! ```
//! Numbers are little-endian. Blocking. Implements spec 09b §6 (verify), §7.

use std::{
    fs::File,
    io::{self, BufReader, Read, Write},
};

use rustix::fs::{FileType, OFlags};

use super::{
    error::{ImageError, IoContext},
    unpacker::root::RootDir,
};

/// Maximum length of a run of literal bytes; longer ones are split.
const LONGEST_RUN: usize = 64 << 10;
/// Maximum length of a path, bytes.
const LONGEST_PATH: usize = 4096;
/// Maximum size of a recipe, compressed bytes: beyond it the layer has none.
const LARGEST: u64 = 256 << 20;
const RUN: u8 = 0;
const FILE: u8 = 1;
const END: u8 = 2;

/// Counts the compressed bytes of a recipe.
struct CountingWriter(File, u64);

impl Write for CountingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.0.write(bytes)?;
        self.1 = self.1.saturating_add(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writer of a recipe's records; it merges adjacent literal bytes into runs.
struct RecipeWriter {
    out: zstd::Encoder<'static, CountingWriter>,
    run: Vec<u8>,
}

impl RecipeWriter {
    fn run(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = LONGEST_RUN.saturating_sub(self.run.len()).min(bytes.len());
            let (now, later) = bytes.split_at(room);
            self.run.extend_from_slice(now);
            bytes = later;
            if self.run.len() == LONGEST_RUN {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.run.is_empty() {
            return Ok(());
        }
        let length = u32::try_from(self.run.len()).map_err(io::Error::other)?;
        self.out.write_all(&[RUN])?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(&self.run)?;
        self.run.clear();
        Ok(())
    }

    fn file(&mut self, path: &[u8], bytes: u64) -> io::Result<()> {
        self.flush()?;
        let length = u16::try_from(path.len()).map_err(io::Error::other)?;
        self.out.write_all(&[FILE])?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(path)?;
        self.out.write_all(&bytes.to_le_bytes())
    }

    fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        self.out.write_all(&[END])?;
        self.out.finish().map(drop)
    }
}

/// A stream that records its recipe as it is read.
pub struct RecipeRecorder<R> {
    inner: R,
    notes: Option<RecipeWriter>,
    /// Bytes of a file still to come; they are not recorded.
    of_file: u64,
    failure: Option<io::Error>,
}

impl<R: Read> RecipeRecorder<R> {
    /// Wraps a stream; the recipe is written to `into`.
    ///
    /// # Errors
    /// The compressor cannot be set up.
    pub fn new(inner: R, into: Option<File>) -> Result<Self, ImageError> {
        let notes = into
            .map(|file| zstd::Encoder::new(CountingWriter(file, 0), 1))
            .transpose()
            .attempt("write recipe of the layer")?;
        let notes = notes.map(|out| RecipeWriter { out, run: Vec::with_capacity(LONGEST_RUN) });
        Ok(Self { inner, notes, of_file: 0, failure: None })
    }

    /// The wrapped stream.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Announces that the next bytes are the content of a file.
    pub fn file(&mut self, path: &[u8], bytes: u64) {
        if path.len() <= LONGEST_PATH && bytes > 0 {
            self.of_file = bytes;
            self.note(|notes| notes.file(path, bytes));
        }
    }

    fn note(&mut self, write: impl FnOnce(&mut RecipeWriter) -> io::Result<()>) {
        let Some(notes) = &mut self.notes else { return };
        match write(notes) {
            Err(error) => {
                self.failure = Some(error);
                self.notes = None;
            }
            Ok(()) if notes.out.get_ref().1 > LARGEST => self.notes = None,
            Ok(()) => {}
        }
    }

    /// Completes the recipe; returns the stream, and whether the recipe is complete.
    ///
    /// # Errors
    /// The recipe could not be written.
    pub fn finish(self) -> Result<(R, bool), ImageError> {
        match (self.failure, self.notes) {
            (Some(error), _) => Err(ImageError::io("write recipe of the layer", &error)),
            (None, None) => Ok((self.inner, false)),
            (None, Some(notes)) => {
                notes.finish().attempt("write recipe of the layer")?;
                Ok((self.inner, true))
            }
        }
    }
}

impl<R: Read> Read for RecipeRecorder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let skipped = usize::try_from(self.of_file).unwrap_or(usize::MAX).min(count);
        self.of_file -= skipped as u64;
        let noted = buffer.get(skipped..count).unwrap_or_default();
        self.note(|notes| notes.run(noted));
        Ok(count)
    }
}

enum Piece {
    /// Bytes left of a run.
    Run(u64),
    File(File, u64),
    End,
}

/// A reader of a layer's restored tar stream.
pub struct RestoredStream {
    recipe: zstd::Decoder<'static, BufReader<File>>,
    root: RootDir,
    piece: Piece,
}

impl RestoredStream {
    /// Opens a recipe for the layer's directory.
    ///
    /// # Errors
    /// The decompressor cannot be set up.
    pub fn new(recipe: File, root: RootDir) -> Result<Self, ImageError> {
        let recipe = zstd::Decoder::new(recipe).attempt("read recipe of the layer")?;
        Ok(Self { recipe, root, piece: Piece::Run(0) })
    }

    fn next(&mut self) -> io::Result<Piece> {
        let wrong = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
        let [kind] = self.bytes()?;
        match kind {
            RUN => {
                let length = u32::from_le_bytes(self.bytes()?);
                let is_good = usize::try_from(length).is_ok_and(|length| length <= LONGEST_RUN);
                if is_good { Ok(Piece::Run(length.into())) } else { Err(wrong("recipe: run is too long")) }
            }
            FILE => {
                let length = usize::from(u16::from_le_bytes(self.bytes()?));
                if length > LONGEST_PATH {
                    return Err(wrong("recipe: path is too long"));
                }
                let mut path = vec![0; length];
                self.recipe.read_exact(&mut path)?;
                let bytes = u64::from_le_bytes(self.bytes()?);
                // NONBLOCK: a FIFO in place of the file must not block the open.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
                let named = |error: io::Error| {
                    io::Error::new(error.kind(), format!("{}: {error}", String::from_utf8_lossy(&path)))
                };
                let fd = self.root.resolve(&path, flags).map_err(|error| named(error.into()))?;
                let stat = rustix::fs::fstat(&fd)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(named(wrong("no longer a regular file")));
                }
                Ok(Piece::File(File::from(fd), bytes))
            }
            END => Ok(Piece::End),
            _ => Err(wrong("recipe: unknown entry kind")),
        }
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.recipe.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Read for RestoredStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let (count, left) = match &mut self.piece {
                Piece::End => return Ok(0),
                Piece::Run(left) => (limited(&mut self.recipe, buffer, *left)?, left),
                Piece::File(file, left) => (limited(file, buffer, *left)?, left),
            };
            if count > 0 {
                *left -= count as u64;
                return Ok(count);
            }
            if *left > 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "file of the layer is shorter than recorded"));
            }
            self.piece = self.next()?;
        }
    }
}

fn limited(from: &mut impl Read, buffer: &mut [u8], left: u64) -> io::Result<usize> {
    let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
    // A zstd read into an empty buffer is an error.
    if most == 0 { Ok(0) } else { from.read(buffer.get_mut(..most).unwrap_or_default()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_comes_back_to_the_byte() {
        let dir = tempfile::tempdir().expect("a directory");
        let long = vec![7; 200_000];
        let stream = [&b"head"[..], &long, b"content", b"tail", &[0; 1024]].concat();
        std::fs::write(dir.path().join("file"), "content").expect("writable");
        let recipe = dir.path().join("recipe");
        let mut noting =
            RecipeRecorder::new(&stream[..], Some(File::create(&recipe).expect("makeable"))).expect("set up");
        let mut head = vec![0; 4 + long.len()];
        noting.read_exact(&mut head).expect("readable");
        noting.file(b"file", 7);
        io::copy(&mut noting, &mut io::sink()).expect("readable");
        assert!(noting.finish().expect("written").1);
        assert!(std::fs::metadata(&recipe).expect("there").len() < 500, "packed");
        let rebuilt = || {
            let root = RootDir::open(dir.path()).expect("there");
            let mut out = Vec::new();
            let mut stream = RestoredStream::new(File::open(&recipe).expect("there"), root).expect("a recipe");
            stream.read_to_end(&mut out).map(|_| out)
        };
        assert_eq!(rebuilt().expect("whole"), stream);
        for (content, expected) in [("conten", "shorter"), ("", "shorter")] {
            std::fs::write(dir.path().join("file"), content).expect("writable");
            assert!(rebuilt().expect_err("changed").to_string().contains(expected));
        }
        std::fs::remove_file(dir.path().join("file")).expect("removable");
        assert!(rebuilt().expect_err("gone").to_string().starts_with("file: "));
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("file")).expect("makeable");
        assert!(rebuilt().is_err(), "a link is no file");
    }
}
