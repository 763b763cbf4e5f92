//! How requests, replies and events are written into datagrams. Pure.
//!
//! ```text
//! magic u16 │ version u16 │ kind u16 │ flags u16 │ sequence u32 │ length u32 │ body (CBOR, at most 1 MiB)
//! ```
//! Numbers are little-endian. What cannot be read is an error, never a panic: the other side may be older, newer or
//! broken. Behaviour: spec 09a §14.

use serde::{Serialize, de::DeserializeOwned};

use super::plan::{MAGIC, MAX_BODY, VERSION};

/// Bytes before the body.
pub const HEADER: usize = 16;

/// What a datagram carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A question of the daemon.
    Request,
    /// Its answer, under the same sequence number.
    Reply,
    /// Something the shim tells unasked; its sequence number is 0.
    Event,
}

impl Kind {
    fn number(self) -> u16 {
        match self {
            Self::Request => 0,
            Self::Reply => 1,
            Self::Event => 2,
        }
    }
}

/// A datagram whose header was understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'a> {
    /// What it carries.
    pub kind: Kind,
    /// Which question it is or answers.
    pub sequence: u32,
    body: &'a [u8],
}

/// Why a datagram cannot be read or written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// It is no datagram of ours.
    #[error("not a message of the shim protocol: {0}")]
    Header(&'static str),
    /// Another protocol.
    #[error("the other side speaks version {0} of the shim protocol, this one {VERSION}")]
    Version(u16),
    /// It is longer than a message may be.
    #[error("a message of {0} bytes is longer than {MAX_BODY}")]
    Long(usize),
    /// Its body is not what it should be.
    #[error("the body of a message cannot be read: {0}")]
    Body(String),
}

impl<'a> Datagram<'a> {
    /// Reads a header.
    ///
    /// # Errors
    /// Where it is not one of ours.
    pub fn read(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(WireError::Header("too short"));
        };
        let [m0, m1, v0, v1, k0, k1, _, _, s0, s1, s2, s3, l0, l1, l2, l3] = *header;
        if u16::from_le_bytes([m0, m1]) != MAGIC {
            return Err(WireError::Header("another magic number"));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        let kind = match u16::from_le_bytes([k0, k1]) {
            0 => Kind::Request,
            1 => Kind::Reply,
            2 => Kind::Event,
            _ => return Err(WireError::Header("an unknown kind")),
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if body.len() > MAX_BODY {
            return Err(WireError::Long(body.len()));
        }
        if usize::try_from(length) != Ok(body.len()) {
            return Err(WireError::Header("another length than it says"));
        }
        Ok(Self { kind, sequence: u32::from_le_bytes([s0, s1, s2, s3]), body })
    }

    /// Reads the body.
    ///
    /// # Errors
    /// Where it is not a `T`, or something follows it.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        let mut rest = self.body;
        let value = ciborium::from_reader(&mut rest).map_err(|e| WireError::Body(e.to_string()))?;
        if rest.is_empty() { Ok(value) } else { Err(WireError::Body(format!("{} bytes follow it", rest.len()))) }
    }
}

/// Writes a datagram.
///
/// # Errors
/// Where it would be too long.
pub fn write<T: Serialize>(kind: Kind, sequence: u32, body: &T) -> Result<Vec<u8>, WireError> {
    let mut out = vec![0; HEADER];
    ciborium::into_writer(body, &mut out).map_err(|e| WireError::Body(e.to_string()))?;
    let length = out.len() - HEADER;
    let Some(announced) = u32::try_from(length).ok().filter(|_| length <= MAX_BODY) else {
        return Err(WireError::Long(length));
    };
    let fields = [MAGIC, VERSION, kind.number(), 0].into_iter().flat_map(u16::to_le_bytes);
    let header = fields.chain(sequence.to_le_bytes()).chain(announced.to_le_bytes());
    for (place, byte) in out.iter_mut().zip(header) {
        *place = byte;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{LaunchPlan, Reply, Request, Scope, Target};

    #[test]
    fn what_is_written_is_read() {
        let request = Request::Signal { to: Target::Container("c".into()), signal: 15, scope: Scope::Group };
        let bytes = write(Kind::Request, 7, &request).expect("short");
        let datagram = Datagram::read(&bytes).expect("ours");
        assert_eq!((datagram.kind, datagram.sequence), (Kind::Request, 7));
        assert_eq!(datagram.body::<Request>(), Ok(request));
        assert!(datagram.body::<Reply>().is_err());
        assert!(datagram.body::<LaunchPlan>().is_err());
    }

    #[test]
    fn what_is_not_ours_is_an_error() {
        let good = write(Kind::Reply, 1, &Reply::Done).expect("short");
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(Datagram::read(&good[..15]), Err(WireError::Header("too short")));
        assert_eq!(Datagram::read(&with(0, 0)), Err(WireError::Header("another magic number")));
        assert_eq!(Datagram::read(&with(2, 9)), Err(WireError::Version(9)));
        assert_eq!(Datagram::read(&with(4, 9)), Err(WireError::Header("an unknown kind")));
        assert_eq!(Datagram::read(&with(12, 99)), Err(WireError::Header("another length than it says")));
        assert!(matches!(write(Kind::Event, 0, &"x".repeat(MAX_BODY)), Err(WireError::Long(_))));
    }
}
