//! Parses one 512-byte tar header. Pure.

use super::TarError;

/// Size of a header, and alignment of content, bytes.
pub const BLOCK: usize = 512;

/// Type flag of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flag {
    /// A regular file.
    Regular,
    /// Type `1`: a further name of a file in the archive.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    Character,
    /// A block device.
    Block,
    /// Type `5`; it has no content, whatever the size field.
    Directory,
    /// Type `6`: a named pipe.
    Fifo,
    /// A sparse file in old GNU format.
    GnuSparse,
    /// PAX extended header of the next entry.
    Extension,
    /// PAX global extended header.
    GlobalExtension,
    /// GNU long name of the next entry.
    LongName,
    /// GNU long link target of the next entry.
    LongLink,
}

/// Fields of a header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Path, with the prefix joined.
    pub name: Vec<u8>,
    /// Permission bits including setuid, setgid, sticky.
    pub mode: u32,
    /// User ID of the owner.
    pub uid: u64,
    /// Group ID of the owner.
    pub gid: u64,
    /// Size field, bytes.
    pub size: u64,
    /// Modification time, seconds since the epoch.
    pub mtime: i64,
    /// Type of the entry.
    pub flag: Flag,
    /// Target of a link.
    pub link: Vec<u8>,
    /// Major and minor number of a device; 0 for other types.
    pub device: (u32, u32),
}

/// Whether a block contains only zeros: the end of an archive.
pub fn is_zero(block: &[u8; BLOCK]) -> bool {
    block.iter().all(|byte| *byte == 0)
}

impl Header {
    /// Parses a header.
    ///
    /// # Errors
    /// The checksum or a number is invalid, or the type is unknown.
    pub fn parse(block: &[u8; BLOCK]) -> Result<Self, TarError> {
        check_sum(block)?;
        let field = |from: usize, length: usize| block.get(from..from + length).unwrap_or_default();
        let name = text(field(0, 100));
        let is_posix = field(257, 6) == b"ustar\0";
        let is_gnu = field(257, 8) == b"ustar  \0";
        let prefix = if is_posix { text(field(345, 155)) } else { &[] };
        let name = if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() };
        let unsigned = |from, length| unsigned(field(from, length));
        let device = |from| if is_posix || is_gnu { unsigned(from, 8) } else { Ok(0) };
        let small = |value: u64| u32::try_from(value).map_err(|_| TarError::Header("number is too large"));
        let mode = (unsigned(100, 8)? & 0o7777) as u32;
        let flag = flag(field(156, 1).first().copied().unwrap_or(0))?;
        let is_device = matches!(flag, Flag::Character | Flag::Block);
        let device = if is_device { (small(device(329)?)?, small(device(337)?)?) } else { (0, 0) };
        Ok(Self {
            mode,
            uid: unsigned(108, 8)?,
            gid: unsigned(116, 8)?,
            size: unsigned(124, 12)?,
            mtime: number(field(136, 12))?,
            flag,
            link: text(field(157, 100)).to_vec(),
            device,
            name,
        })
    }

    /// Bytes of content after this header: 0 for types without content, whatever the size field.
    pub fn content(&self) -> u64 {
        match self.flag {
            Flag::HardLink | Flag::Symlink | Flag::Character | Flag::Block | Flag::Directory | Flag::Fifo => 0,
            _ => self.size,
        }
    }
}

fn flag(byte: u8) -> Result<Flag, TarError> {
    Ok(match byte {
        0 | b'0' | b'7' => Flag::Regular,
        b'1' => Flag::HardLink,
        b'2' => Flag::Symlink,
        b'3' => Flag::Character,
        b'4' => Flag::Block,
        b'5' => Flag::Directory,
        b'6' => Flag::Fifo,
        b'S' => Flag::GnuSparse,
        b'x' => Flag::Extension,
        b'g' => Flag::GlobalExtension,
        b'L' => Flag::LongName,
        b'K' => Flag::LongLink,
        other => return Err(TarError::UnknownType(char::from(other))),
    })
}

fn check_sum(block: &[u8; BLOCK]) -> Result<(), TarError> {
    let wanted = number(block.get(148..156).unwrap_or_default())?;
    let (mut plain, mut signed) = (0i64, 0i64);
    for (at, byte) in block.iter().enumerate() {
        let byte = if (148..156).contains(&at) { b' ' } else { *byte };
        plain += i64::from(byte);
        // Old SunOS tar sums signed characters.
        signed += i64::from(byte as i8);
    }
    if wanted == plain || wanted == signed { Ok(()) } else { Err(TarError::Header("checksum mismatch")) }
}

/// The field up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Parses a non-negative number.
///
/// # Errors
/// The field is negative or no number.
pub fn unsigned(field: &[u8]) -> Result<u64, TarError> {
    u64::try_from(number(field)?).map_err(|_| TarError::Header("number is negative"))
}

/// Octal digits, or base 256 if the first bit is set.
fn number(field: &[u8]) -> Result<i64, TarError> {
    const WRONG: TarError = TarError::Header("not a number");
    if field.first().is_some_and(|byte| byte & 0x80 != 0) {
        let is_negative = field.first().is_some_and(|byte| byte & 0x40 != 0);
        let mut value: i64 = if is_negative { -1 } else { 0 };
        for (at, byte) in field.iter().enumerate() {
            let byte = match (at, is_negative) {
                (0, false) => byte & 0x7f,
                _ => *byte,
            };
            value = value.checked_mul(256).ok_or(WRONG)? | i64::from(byte);
        }
        return Ok(value);
    }
    let is_blank = |byte: &u8| matches!(byte, b' ' | 0);
    let start = field.iter().position(|byte| !is_blank(byte)).unwrap_or(field.len());
    let digits = field.get(start..).unwrap_or_default().split(is_blank).next().unwrap_or_default();
    digits.iter().try_fold(0i64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8).map(|value| value | i64::from(digit - b'0')).ok_or(WRONG),
        _ => Err(WRONG),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_all_kinds_are_read() {
        for (field, expected) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"\x80\0\0\0\0\0\x01\x00", Some(256)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", Some(-1)),
            (b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", Some(i64::MAX)),
            (b"\x80\0\0\x01\0\0\0\0\0\0\0\0\0", None),
            (b"00000x\0\0", None),
            (b"8\0", None),
            (b"7777777777777777777777777", None),
        ] {
            assert_eq!(number(field).ok(), expected, "{field:?}");
        }
    }

    #[test]
    fn a_header_of_another_crate_is_read() {
        let mut header = tar::Header::new_ustar();
        header.set_path("some/where").expect("short");
        header.set_size(77);
        header.set_mode(0o104_755);
        header.set_uid(1000);
        header.set_gid(1001);
        header.set_mtime(12345);
        header.set_cksum();
        let read = Header::parse(header.as_bytes()).expect("a header");
        assert_eq!((read.name.as_slice(), read.size, read.mode), (&b"some/where"[..], 77, 0o4755));
        assert_eq!((read.uid, read.gid, read.mtime, read.flag), (1000, 1001, 12345, Flag::Regular));
        let mut broken = *header.as_bytes();
        broken[0] ^= 1;
        assert!(matches!(Header::parse(&broken), Err(TarError::Header("checksum mismatch"))));
    }
}
