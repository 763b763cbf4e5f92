//! Netlink message encoder and defensive decoder: headers and attributes. Pure.
//!
//! Layout: `nlmsghdr`, a fixed head of the protocol, then attributes (`nlattr`), each padded to four bytes.

/// Size of `nlmsghdr`, bytes.
pub const HEADER: usize = 16;
/// Size of an attribute header, bytes.
const ATTRIBUTE: usize = 4;
/// `NLA_F_NESTED`: the attribute contains attributes.
const NESTED: u16 = 1 << 15;
/// Mask of the type in an attribute's type field (`NLA_TYPE_MASK`).
const KIND: u16 = 0x3fff;

/// `NLM_F_REQUEST`.
pub const REQUEST: u16 = 0x01;
/// `NLM_F_ACK`: requests an acknowledgement on success too.
pub const ACK: u16 = 0x04;
/// `NLM_F_DUMP`.
pub const DUMP: u16 = 0x300;
/// `NLM_F_REPLACE`.
pub const REPLACE: u16 = 0x100;
/// `NLM_F_EXCL`.
pub const EXCLUSIVE: u16 = 0x200;
/// `NLM_F_CREATE`.
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
pub const APPEND: u16 = 0x800;

/// A message to the kernel. Its length fields are correct at any time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// A request of this type with additional flags and the protocol's fixed header.
    pub fn new(kind: u16, flags: u16, head: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend([0; 4]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | REQUEST).to_ne_bytes());
        bytes.extend([0; 8]);
        let mut message = Self { bytes };
        message.append(head);
        message
    }

    /// Encoded message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sets the sequence number, and requests an acknowledgement if `wants_answer`.
    pub fn stamp(&mut self, sequence: u32, wants_answer: bool) {
        self.put(8, &sequence.to_ne_bytes());
        if wants_answer {
            let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) | ACK;
            self.put(6, &flags.to_ne_bytes());
        }
    }

    /// Adds flags.
    #[must_use]
    pub fn with_flags(mut self, flags: u16) -> Self {
        let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) | flags;
        self.put(6, &flags.to_ne_bytes());
        self
    }

    /// Adds an attribute.
    ///
    /// # Panics
    /// If the value exceeds the maximum length of an attribute; callers split long lists.
    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        self.attribute(kind, value);
        self
    }

    /// Adds a NUL-terminated string attribute.
    #[must_use]
    pub fn with_text(self, kind: u16, text: &str) -> Self {
        let mut value = text.as_bytes().to_vec();
        value.push(0);
        self.with(kind, &value)
    }

    /// Adds an integer attribute in native byte order.
    #[must_use]
    pub fn with_u32(self, kind: u16, value: u32) -> Self {
        self.with(kind, &value.to_ne_bytes())
    }

    /// Adds an integer attribute in network byte order.
    #[must_use]
    pub fn with_be32(self, kind: u16, value: u32) -> Self {
        self.with(kind, &value.to_be_bytes())
    }

    /// Adds a nested attribute with the attributes that `fill` adds.
    #[must_use]
    pub fn with_nest(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let at = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend((kind | NESTED).to_ne_bytes());
        let mut filled = fill(self);
        let length = u16::try_from(filled.bytes.len() - at).expect("a list is divided before it is this long");
        filled.put(at, &length.to_ne_bytes());
        filled.update_length();
        filled
    }

    /// Adds raw bytes: a fixed header inside a nested attribute.
    #[must_use]
    pub fn with_head(mut self, head: &[u8]) -> Self {
        self.append(head);
        self
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE + value.len()).expect("an attribute's value is short");
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.append(value);
    }

    fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.update_length();
    }

    fn update_length(&mut self) {
        let length = u32::try_from(self.bytes.len()).expect("a message is short");
        self.put(0, &length.to_ne_bytes());
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }
}

/// Iterates over received messages: type, flags, sequence number, payload. Stops at the first malformed one.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, u16, u32, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let body = bytes.get(HEADER..length)?;
        let (kind, flags, sequence) = (u16_at(bytes, 4)?, u16_at(bytes, 6)?, u32_at(bytes, 8)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, flags, sequence, body))
    })
}

/// Iterator over the attributes of a message or of a nested attribute: type and value. Stops at a malformed one.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    bytes: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Attributes after a fixed header of `head` bytes.
    pub fn behind(body: &'a [u8], head: usize) -> Self {
        Self { bytes: body.get(head.next_multiple_of(4)..).unwrap_or_default() }
    }

    /// Value of the first attribute of this type.
    pub fn get(self, kind: u16) -> Option<&'a [u8]> {
        self.into_iter().find(|(k, _)| *k == kind).map(|(_, value)| value)
    }

    /// Attributes nested in the first attribute of this type; empty if there is none.
    pub fn nest(self, kind: u16) -> Self {
        Self { bytes: self.get(kind).unwrap_or_default() }
    }

    /// String value up to its first NUL.
    pub fn text(self, kind: u16) -> Option<String> {
        let value = self.get(kind)?;
        let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
        Some(String::from_utf8_lossy(value.get(..end)?).into_owned())
    }

    /// Integer value in native byte order.
    pub fn u32(self, kind: u16) -> Option<u32> {
        u32_at(self.get(kind)?, 0)
    }

    /// Integer value in network byte order.
    pub fn be32(self, kind: u16) -> Option<u32> {
        u32_at(self.get(kind)?, 0).map(u32::from_be)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16_at(self.bytes, 0)?);
        let kind = u16_at(self.bytes, 2)? & KIND;
        let value = self.bytes.get(ATTRIBUTE..length)?;
        self.bytes = self.bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

/// Integer at this offset, in native byte order; `None` beyond the end.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Integer at this offset, in native byte order; `None` beyond the end.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_ne_bytes)
}

/// Integer at this offset, in native byte order; `None` beyond the end.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at.checked_add(2)?)?.try_into().ok().map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read() {
        let mut message = Message::new(16, CREATE, &[7; 6])
            .with_text(3, "eth0")
            .with_nest(18, |m| m.with_u32(1, 5).with_nest(2, |m| m.with_be32(9, 6)));
        message.stamp(42, true);
        let all: Vec<_> = messages(message.bytes()).collect();
        let [(kind, flags, sequence, body)] = all.as_slice() else { panic!("one message: {all:?}") };
        assert_eq!((*kind, *flags, *sequence), (16, CREATE | REQUEST | ACK, 42));
        let found = Attributes::behind(body, 6);
        assert_eq!(found.text(3).as_deref(), Some("eth0"));
        assert_eq!(found.nest(18).u32(1), Some(5));
        assert_eq!(found.nest(18).nest(2).be32(9), Some(6));
        assert_eq!(found.nest(77).u32(1), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..200), head in 0usize..40) {
            for (_, _, _, body) in messages(&bytes) {
                for (kind, _) in Attributes::behind(body, head) {
                    let _ = Attributes::behind(body, head).nest(kind).text(1);
                }
            }
            prop_assert!(Attributes::behind(&bytes, head).count() <= bytes.len());
        }
    }
}
