//! Tar reader: walks a stream entry by entry, with one header and its extensions in memory.

use std::io::{self, Read};

use super::{
    TarError,
    header::{self, BLOCK, Flag, Header},
    pax::{self, Extensions},
    sparse::{self, DataMap, Map},
};

/// Maximum size of an extension (names, PAX records), bytes.
const LONGEST_EXTENSION: u64 = 1 << 20;
/// Maximum number of consecutive extensions before an entry.
const MOST_EXTENSIONS: usize = 16;

/// Type of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TarEntryKind {
    /// A regular file; its content follows.
    Regular,
    /// A hard link to a path in the archive.
    HardLink(Vec<u8>),
    /// A symbolic link with its target.
    Symlink(Vec<u8>),
    /// A directory; also a regular entry whose name ends in `/`, as in V7 archives.
    Directory,
    /// A named pipe, without content.
    Fifo,
    /// A character device: major and minor number.
    Character(u32, u32),
    /// A block device: major and minor number.
    Block(u32, u32),
}

/// An entry with its extensions applied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TarEntry {
    /// Path as in the archive.
    pub name: Vec<u8>,
    /// Type of the entry.
    pub kind: TarEntryKind,
    /// Permission bits including setuid, setgid, sticky.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u64,
    /// Group ID of the owner.
    pub gid: u64,
    /// Modification time, seconds and nanoseconds since the epoch.
    pub mtime: (i64, u32),
    /// Access time, likewise, if the archive contains it.
    pub atime: Option<(i64, u32)>,
    /// Extended attributes: name and value.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes of content that follow in the archive.
    pub size: u64,
    /// Position of the content in a sparse file.
    pub sparse: Option<Map>,
}

impl TarEntry {
    /// Length of the extracted file, bytes.
    pub fn length(&self) -> u64 {
        self.sparse.as_ref().map_or(self.size, |map| map.size)
    }
}

/// Reads entries; [`Read`] returns the content of the current one.
pub struct TarReader<R> {
    inner: R,
    /// Unread bytes of the current entry's content.
    left: u64,
    padding: u64,
    ended: bool,
}

impl<R: Read> TarReader<R> {
    /// Wraps a stream.
    pub fn new(inner: R) -> Self {
        Self { inner, left: 0, padding: 0, ended: false }
    }

    /// Returns the stream at its current position.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The wrapped stream.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// The wrapped stream, mutable.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// Skips up to `size` bytes of the current entry's content by seeking.
    ///
    /// # Errors
    /// The seek fails. Missing content is detected only when the next header is read.
    pub fn pass(&mut self, size: u64) -> Result<(), TarError>
    where
        R: io::Seek,
    {
        let by = size.min(self.left);
        let offset = i64::try_from(by).map_err(|_| TarError::Header("number is too large"))?;
        self.inner.seek_relative(offset)?;
        self.left -= by;
        Ok(())
    }

    /// Reads the next entry; `None` at the end of the archive. Skips unread content of the current one.
    ///
    /// # Errors
    /// The archive is invalid or truncated.
    pub fn next_entry(&mut self) -> Result<Option<TarEntry>, TarError> {
        let mut extensions = Extensions::default();
        for extensions_seen in 0.. {
            if extensions_seen > MOST_EXTENSIONS {
                return Err(TarError::Header("too many extensions in a row"));
            }
            self.skip()?;
            let Some(block) = self.header_block()? else {
                return if extensions_seen == 0 { Ok(None) } else { Err(TarError::Truncated) };
            };
            let header = Header::parse(&block)?;
            match header.flag {
                Flag::GlobalExtension => self.set_content(header.size),
                Flag::Extension => pax::parse(&self.extension(header.size)?, &mut extensions)?,
                Flag::LongName => extensions.path = Some(until_nul(self.extension(header.size)?)),
                Flag::LongLink => extensions.link = Some(until_nul(self.extension(header.size)?)),
                _ => return self.entry(header, &block, extensions).map(Some),
            }
        }
        Ok(None)
    }

    fn entry(&mut self, mut header: Header, block: &[u8; BLOCK], extensions: Extensions) -> Result<TarEntry, TarError> {
        header.size = extensions.size.unwrap_or(header.size);
        if header.flag == Flag::Regular && extensions.path.as_ref().unwrap_or(&header.name).ends_with(b"/") {
            // V7 archives have no type for directories.
            header.flag = Flag::Directory;
        }
        self.set_content(header.content());
        let mut sparse = None;
        if header.flag == Flag::GnuSparse {
            sparse = Some(self.gnu_map(block)?);
        }
        let mut name = extensions.path.unwrap_or(header.name);
        if header.flag == Flag::Regular {
            let is_in_data = extensions.sparse.is_in_data;
            if let Some(real) = &extensions.sparse.name {
                name.clone_from(real);
            }
            sparse = extensions.sparse.map();
            if let (true, Some(map)) = (is_in_data, &mut sparse) {
                map.pieces = self.data_map()?;
            }
        }
        let sparse = sparse.map(|map| map.checked(self.left)).transpose()?;
        let link = extensions.link.unwrap_or(header.link);
        let kind = match header.flag {
            Flag::HardLink => TarEntryKind::HardLink(link),
            Flag::Symlink => TarEntryKind::Symlink(link),
            Flag::Character => TarEntryKind::Character(header.device.0, header.device.1),
            Flag::Block => TarEntryKind::Block(header.device.0, header.device.1),
            Flag::Directory => TarEntryKind::Directory,
            Flag::Fifo => TarEntryKind::Fifo,
            _ => TarEntryKind::Regular,
        };
        Ok(TarEntry {
            name,
            kind,
            mode: header.mode,
            uid: extensions.uid.unwrap_or(header.uid),
            gid: extensions.gid.unwrap_or(header.gid),
            mtime: extensions.mtime.unwrap_or((header.mtime, 0)),
            atime: extensions.atime,
            attributes: extensions.attributes,
            size: self.left,
            sparse,
        })
    }

    fn gnu_map(&mut self, block: &[u8; BLOCK]) -> Result<Map, TarError> {
        let (mut map, mut has_more) = sparse::gnu_header(block)?;
        while has_more {
            let mut block = [0u8; BLOCK];
            self.exactly(&mut block)?;
            has_more = sparse::gnu_more(&block, &mut map)?;
        }
        Ok(map)
    }

    fn data_map(&mut self) -> Result<Vec<(u64, u64)>, TarError> {
        let mut map = DataMap::default();
        loop {
            let left = self.left.checked_sub(BLOCK as u64);
            self.left = left.ok_or(TarError::Header("invalid sparse map"))?;
            let mut block = [0u8; BLOCK];
            self.exactly(&mut block)?;
            if let Some(pieces) = map.feed(&block)? {
                return Ok(pieces);
            }
        }
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > LONGEST_EXTENSION {
            return Err(TarError::TooLong(size));
        }
        self.set_content(size);
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        if self.left > 0 { Err(TarError::Truncated) } else { Ok(bytes) }
    }

    fn set_content(&mut self, size: u64) {
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    /// Skips the rest of the current entry.
    fn skip(&mut self) -> Result<(), TarError> {
        let left = self.left.checked_add(self.padding).ok_or(TarError::Header("number is too large"))?;
        let passed = io::copy(&mut (&mut self.inner).take(left), &mut io::sink())?;
        (self.left, self.padding) = (0, 0);
        if passed < left { Err(TarError::Truncated) } else { Ok(()) }
    }

    /// Reads the next header; `None` at the end: a zero block or the end of the stream.
    fn header_block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        if self.ended {
            return Ok(None);
        }
        let mut block = [0u8; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(block.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.ended = filled == 0 || (filled == BLOCK && header::is_zero(&block));
        match filled {
            _ if self.ended => Ok(None),
            BLOCK => Ok(Some(block)),
            _ => Err(TarError::Truncated),
        }
    }

    fn exactly(&mut self, block: &mut [u8]) -> Result<(), TarError> {
        self.inner.read_exact(block).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => TarError::Truncated,
            _ => TarError::Io(error),
        })
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.inner.read(buffer.get_mut(..most).unwrap_or_default())?;
        self.left = self.left.saturating_sub(count as u64);
        Ok(count)
    }
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        fill(&mut builder);
        builder.into_inner().expect("in memory")
    }

    fn add(builder: &mut tar::Builder<Vec<u8>>, name: &str, content: &[u8]) {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content).expect("in memory");
    }

    #[test]
    fn entries_and_contents_are_read_and_skipped() {
        let long = "d/".repeat(120) + "file";
        let bytes = archive(|builder| {
            add(builder, "a", b"hello");
            add(builder, &long, &[7; 1000]);
            add(builder, "b", b"");
        });
        let mut reader = TarReader::new(&bytes[..]);
        let first = reader.next_entry().expect("whole").expect("an entry");
        assert_eq!((first.name.as_slice(), first.size), (&b"a"[..], 5));
        let mut content = Vec::new();
        reader.read_to_end(&mut content).expect("readable");
        assert_eq!(content, b"hello");
        let second = reader.next_entry().expect("whole").expect("an entry");
        assert_eq!((second.name, second.size), (long.into_bytes(), 1000));
        assert_eq!(reader.next_entry().expect("whole").expect("an entry").name, b"b");
        assert!(reader.next_entry().expect("whole").is_none());
        assert!(reader.next_entry().expect("whole").is_none());
    }

    #[test]
    fn a_truncated_archive_is_an_error() {
        let bytes = archive(|builder| add(builder, "a", &[1; 700]));
        for length in (1..512 * 3).filter(|length| *length != 512 * 3) {
            let mut reader = TarReader::new(&bytes[..length]);
            let all = std::iter::from_fn(|| reader.next_entry().transpose()).collect::<Result<Vec<_>, _>>();
            assert!(all.is_err(), "cut at {length}");
        }
    }

    #[test]
    fn claims_of_huge_sizes_allocate_nothing() {
        for flag in [b'x', b'L', b'K'] {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::new(flag));
            header.set_size(1 << 40);
            header.set_cksum();
            assert!(matches!(TarReader::new(&header.as_bytes()[..]).next_entry(), Err(TarError::TooLong(_))));
        }
    }
}
