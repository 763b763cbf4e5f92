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

/// Maximum length of a record's literal bytes.
const LONGEST: usize = 64 << 10;
const LITERAL: u8 = 0;
const FILE: u8 = 1;
const END: u8 = 2;

/// A stream that records its recipe as it is read.
pub struct RecipeRecorder<R> {
    inner: R,
    recipe: Option<zstd::Encoder<'static, File>>,
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
        let encoder = into.map(|file| zstd::Encoder::new(file, 1)).transpose();
        let recipe = encoder.attempt("write recipe of the layer")?;
        Ok(Self { inner, recipe, of_file: 0, failure: None })
    }

    /// The wrapped stream.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    /// Announces that the next bytes are the content of a file.
    pub fn file(&mut self, path: &[u8], bytes: u64) {
        if let Ok(length) = u16::try_from(path.len())
            && bytes > 0
        {
            self.of_file = bytes;
            self.write(&[&[FILE][..], &length.to_le_bytes(), path, &bytes.to_le_bytes()].concat());
        }
    }

    /// Completes the recipe; returns the stream, and whether there is a recipe.
    ///
    /// # Errors
    /// The recipe could not be written.
    pub fn finish(mut self) -> Result<(R, bool), ImageError> {
        self.write(&[END]);
        let ended = self.recipe.take().map(zstd::Encoder::finish).transpose();
        let written = self.failure.map_or(ended, Err).attempt("write recipe of the layer")?;
        Ok((self.inner, written.is_some()))
    }

    fn write(&mut self, bytes: &[u8]) {
        let written = self.recipe.as_mut().map_or(Ok(()), |recipe| recipe.write_all(bytes));
        if let Err(error) = written {
            // The reader of the stream would report it as a broken layer.
            self.failure = Some(error);
            self.recipe = None;
        }
    }
}

impl<R: Read> Read for RecipeRecorder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let skipped = usize::try_from(self.of_file).unwrap_or(usize::MAX).min(count);
        self.of_file -= skipped as u64;
        for literal in buffer.get(skipped..count).unwrap_or_default().chunks(LONGEST) {
            let length = u32::try_from(literal.len()).map_err(io::Error::other)?;
            self.write(&[&[LITERAL][..], &length.to_le_bytes(), literal].concat());
        }
        Ok(count)
    }
}

/// A reader of a layer's restored tar stream.
pub struct RestoredStream {
    recipe: zstd::Decoder<'static, BufReader<File>>,
    root: RootDir,
    /// Content of the current record; `None` after the end.
    content: Option<io::Take<Box<dyn Read + Send>>>,
}

impl RestoredStream {
    /// Opens a recipe for the layer's directory.
    ///
    /// # Errors
    /// The decompressor cannot be set up.
    pub fn new(recipe: File, root: RootDir) -> Result<Self, ImageError> {
        let recipe = zstd::Decoder::new(recipe).attempt("read recipe of the layer")?;
        let nothing: Box<dyn Read + Send> = Box::new(io::empty());
        Ok(Self { recipe, root, content: Some(nothing.take(0)) })
    }

    fn next_record(&mut self) -> io::Result<Option<io::Take<Box<dyn Read + Send>>>> {
        let [kind] = self.bytes()?;
        let (content, size): (Box<dyn Read + Send>, u64) = match kind {
            END => return Ok(None),
            LITERAL => {
                let length = u32::from_le_bytes(self.bytes()?);
                let literal = self.vector(usize::try_from(length).unwrap_or(usize::MAX))?;
                (Box::new(io::Cursor::new(literal)), length.into())
            }
            FILE => {
                let length = u16::from_le_bytes(self.bytes()?);
                let path = self.vector(length.into())?;
                let size = u64::from_le_bytes(self.bytes()?);
                let file = self.open(&path).map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", String::from_utf8_lossy(&path)))
                })?;
                (Box::new(file), size)
            }
            _ => return Err(invalid("recipe: unknown record kind")),
        };
        Ok(Some(content.take(size)))
    }

    fn vector(&mut self, length: usize) -> io::Result<Vec<u8>> {
        if length > LONGEST {
            return Err(invalid("recipe: record is too long"));
        }
        let mut bytes = vec![0; length];
        self.recipe.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn open(&self, path: &[u8]) -> io::Result<File> {
        // NONBLOCK: a FIFO in place of the file must not block the open.
        let fd = self.root.resolve(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK)?;
        match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
            FileType::RegularFile => Ok(File::from(fd)),
            _ => Err(invalid("no longer a regular file")),
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
        while let Some(content) = &mut self.content {
            let count = content.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            if content.limit() > 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "file of the layer is shorter than recorded"));
            }
            self.content = self.next_record()?;
        }
        Ok(0)
    }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
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
