//! Channel protocols of WebSockets: which one, and how its messages are written (spec 04b §4.1). Pure.

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::{BufMut, Bytes, BytesMut};
use tokio_tungstenite::tungstenite::Message;

use super::status::Style;

/// Protocols that every version of this server has known, without the newest: name, whether messages are text, and how
/// the end is told.
const COMMAND: &[Protocol] = &[
    Protocol { name: "channel.k8s.io", is_text: false, style: Style::Text },
    Protocol { name: "base64.channel.k8s.io", is_text: true, style: Style::Text },
    Protocol { name: "v4.channel.k8s.io", is_text: false, style: Style::Json },
    Protocol { name: "v4.base64.channel.k8s.io", is_text: true, style: Style::Json },
];
const FORWARD: &[&str] = &["v4.channel.k8s.io", "v4.base64.channel.k8s.io"];
/// Where the client names none.
const UNNAMED: Protocol = Protocol { name: "", is_text: false, style: Style::Text };
/// The one that knows half-closed streams.
const NEWEST: Protocol = Protocol { name: "v5.channel.k8s.io", is_text: false, style: Style::Whole };
/// The channel on which channels are closed.
const CLOSE: u8 = 255;

/// A channel protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Its name; empty where the client named none.
    pub name: &'static str,
    is_text: bool,
    /// How a command's end is told.
    pub style: Style,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A channel's number and its bytes.
    Channel(Bytes),
    /// Nothing that matters.
    Nothing,
    /// The client leaves, or says what nobody can read.
    End,
}

impl Protocol {
    /// For exec and attach: the newest, wherever the client names it, as before other runtimes; or else the first of its
    /// wishes that is known; `None` where none is.
    pub fn for_command(offered: &[&str], knows_newest: bool) -> Option<Self> {
        if knows_newest && offered.contains(&NEWEST.name) {
            return Some(NEWEST);
        }
        let known = |name: &&str| COMMAND.iter().copied().find(|known| known.name == *name);
        if offered.is_empty() { Some(UNNAMED) } else { offered.iter().find_map(known) }
    }

    /// For port-forward, a channel pair for each port; `None` where none of the client's wishes is known.
    pub fn for_ports(offered: &[&str]) -> Option<Self> {
        let known = offered.iter().copied().find(|name| FORWARD.contains(name));
        if offered.is_empty() { Some(UNNAMED) } else { Self::for_command(&[known?], false) }
    }

    /// Whether a client can end a channel.
    pub fn closes_channels(self) -> bool {
        self == NEWEST
    }

    /// Writes a message.
    pub fn write(self, channel: u8, bytes: &[u8]) -> Message {
        if self.is_text {
            // More than ten channels have no digit; they go on with what follows in ASCII, as the reference does.
            let mut text = String::from(char::from(b'0'.saturating_add(channel)));
            BASE64_STANDARD.encode_string(bytes, &mut text);
            return Message::Text(text.into());
        }
        let mut message = BytesMut::with_capacity(bytes.len() + 1);
        message.put_u8(channel);
        message.put_slice(bytes);
        Message::Binary(message.freeze())
    }

    /// Reads a message.
    pub fn read(self, message: Message) -> Heard {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            Message::Close(_) => return Heard::End,
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => return Heard::Nothing,
        };
        let Some((&first, rest)) = bytes.split_first() else { return Heard::Nothing };
        if !self.is_text {
            let is_odd = first == CLOSE && !self.closes_channels();
            return if is_odd { Heard::Nothing } else { Heard::Channel(bytes) };
        }
        let Ok(decoded) = BASE64_STANDARD.decode(rest) else { return Heard::End };
        let mut message = BytesMut::with_capacity(decoded.len() + 1);
        message.put_u8(first.wrapping_sub(b'0'));
        message.put_slice(&decoded);
        Heard::Channel(message.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_first_wish_that_is_known() {
        let name = |offered: &[&str], newest| Protocol::for_command(offered, newest).map(|protocol| protocol.name);
        let rows: [(&[&str], bool, Option<&str>); 9] = [
            (&[], true, Some("")),
            (&["channel.k8s.io", "v4.channel.k8s.io"], true, Some("channel.k8s.io")),
            // AC-04b-S7
            (&["v4.channel.k8s.io"], true, Some("v4.channel.k8s.io")),
            (&["x", "v5.channel.k8s.io"], true, Some("v5.channel.k8s.io")),
            (&["v4.channel.k8s.io", "v5.channel.k8s.io"], true, Some("v5.channel.k8s.io")),
            (&["v5.channel.k8s.io"], false, None),
            (&["v5.channel.k8s.io", "v4.base64.channel.k8s.io"], false, Some("v4.base64.channel.k8s.io")),
            (&["v2.channel.k8s.io"], true, None),
            (&["V4.channel.k8s.io"], true, None),
        ];
        for (offered, newest, expected) in rows {
            assert_eq!(name(offered, newest), expected, "{offered:?} {newest}");
        }
        let ports = |offered: &[&str]| Protocol::for_ports(offered).map(|protocol| protocol.name);
        assert_eq!(ports(&[]), Some(""));
        assert_eq!(ports(&["channel.k8s.io", "v4.base64.channel.k8s.io"]), Some("v4.base64.channel.k8s.io"));
        assert_eq!(ports(&["channel.k8s.io"]), None);
    }

    #[test]
    fn messages_both_ways() {
        let of = |name| Protocol::for_command(&[name], true).expect("known");
        let (binary, text, newest) = (of("v4.channel.k8s.io"), of("base64.channel.k8s.io"), of("v5.channel.k8s.io"));
        assert_eq!(binary.write(1, b"foo"), Message::Binary(Bytes::from_static(b"\x01foo")));
        assert_eq!(text.write(1, b"foo"), Message::Text("1Zm9v".into()));
        assert_eq!(text.write(2, b""), Message::Text("2".into()));
        let bytes = |bytes: &'static [u8]| Heard::Channel(Bytes::from_static(bytes));
        let said = |bytes: &'static [u8]| Message::Binary(Bytes::from_static(bytes));
        let rows = [
            (binary, said(b"\0foo"), bytes(b"\0foo")),
            (binary, Message::Text("\0foo".into()), bytes(b"\0foo")),
            (binary, said(&[255, 0]), Heard::Nothing),
            (newest, said(&[255, 0]), bytes(&[255, 0])),
            (binary, said(b""), Heard::Nothing),
            (text, Message::Text("0Zm9v".into()), bytes(b"\0foo")),
            (text, Message::Text("4".into()), bytes(b"\x04")),
            (text, Message::Text("0!".into()), Heard::End),
            (text, Message::Close(None), Heard::End),
            (binary, Message::Ping(Bytes::new()), Heard::Nothing),
        ];
        for (protocol, message, expected) in rows {
            assert_eq!(protocol.read(message.clone()), expected, "{} {message:?}", protocol.name);
        }
    }
}
