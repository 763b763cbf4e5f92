//! WebSocket channel subprotocols: negotiation and message encoding (spec 04b §4.1). Pure.

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::{BufMut, Bytes, BytesMut};
use tokio_tungstenite::tungstenite::Message;

use super::status::StatusFormat;

/// Protocols before version 5: name, whether messages are base64 text, and format of the exit status.
const COMMAND: &[ChannelProtocol] = &[
    ChannelProtocol { name: "channel.k8s.io", is_text: false, style: StatusFormat::Text },
    ChannelProtocol { name: "base64.channel.k8s.io", is_text: true, style: StatusFormat::Text },
    ChannelProtocol { name: "v4.channel.k8s.io", is_text: false, style: StatusFormat::Json },
    ChannelProtocol { name: "v4.base64.channel.k8s.io", is_text: true, style: StatusFormat::Json },
];
const FORWARD: &[&str] = &["v4.channel.k8s.io", "v4.base64.channel.k8s.io"];
/// Used where the client offers no subprotocol.
const UNNAMED: ChannelProtocol = ChannelProtocol { name: "", is_text: false, style: StatusFormat::Text };
/// Protocol with half-closed streams.
const NEWEST: ChannelProtocol =
    ChannelProtocol { name: "v5.channel.k8s.io", is_text: false, style: StatusFormat::Whole };
/// Channel whose messages half-close other channels.
const CLOSE: u8 = 255;

/// WebSocket channel subprotocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelProtocol {
    /// Name; empty where the client offered none.
    pub name: &'static str,
    is_text: bool,
    /// Format of a command's exit status.
    pub style: StatusFormat,
}

/// Decoded message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientMessage {
    /// Channel number, followed by the bytes for it.
    Channel(Bytes),
    /// Message without effect.
    Nothing,
    /// The client closes, or sent an invalid message.
    End,
}

impl ChannelProtocol {
    /// Negotiates for exec and attach: version 5 at any position of the client's list, as the kubelet does in front of
    /// external runtimes; otherwise the first known offer. `None` where no offer is known.
    pub fn for_command(offered: &[&str], knows_newest: bool) -> Option<Self> {
        if knows_newest && offered.contains(&NEWEST.name) {
            return Some(NEWEST);
        }
        let known = |name: &&str| COMMAND.iter().copied().find(|known| known.name == *name);
        if offered.is_empty() { Some(UNNAMED) } else { offered.iter().find_map(known) }
    }

    /// Negotiates for port-forward with two channels per port; `None` where no offer is known.
    pub fn for_ports(offered: &[&str]) -> Option<Self> {
        let known = offered.iter().copied().find(|name| FORWARD.contains(name));
        if offered.is_empty() { Some(UNNAMED) } else { Self::for_command(&[known?], false) }
    }

    /// Whether a client can half-close a channel.
    pub fn closes_channels(self) -> bool {
        self == NEWEST
    }

    /// Encodes a message.
    pub fn write(self, channel: u8, bytes: &[u8]) -> Message {
        if self.is_text {
            // Channels above 9 have no digit; they use the following ASCII characters, as in kubelet.
            let mut text = String::from(char::from(b'0'.saturating_add(channel)));
            BASE64_STANDARD.encode_string(bytes, &mut text);
            return Message::Text(text.into());
        }
        let mut message = BytesMut::with_capacity(bytes.len() + 1);
        message.put_u8(channel);
        message.put_slice(bytes);
        Message::Binary(message.freeze())
    }

    /// Decodes a message.
    pub fn read(self, message: Message) -> ClientMessage {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            Message::Close(_) => return ClientMessage::End,
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => return ClientMessage::Nothing,
        };
        let Some((&first, rest)) = bytes.split_first() else { return ClientMessage::Nothing };
        if !self.is_text {
            let is_odd = first == CLOSE && !self.closes_channels();
            return if is_odd { ClientMessage::Nothing } else { ClientMessage::Channel(bytes) };
        }
        let Ok(decoded) = BASE64_STANDARD.decode(rest) else { return ClientMessage::End };
        let mut message = BytesMut::with_capacity(decoded.len() + 1);
        message.put_u8(first.wrapping_sub(b'0'));
        message.put_slice(&decoded);
        ClientMessage::Channel(message.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_known_protocol_of_the_client_is_selected() {
        let name =
            |offered: &[&str], newest| ChannelProtocol::for_command(offered, newest).map(|protocol| protocol.name);
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
        let ports = |offered: &[&str]| ChannelProtocol::for_ports(offered).map(|protocol| protocol.name);
        assert_eq!(ports(&[]), Some(""));
        assert_eq!(ports(&["channel.k8s.io", "v4.base64.channel.k8s.io"]), Some("v4.base64.channel.k8s.io"));
        assert_eq!(ports(&["channel.k8s.io"]), None);
    }

    #[test]
    fn messages_both_ways() {
        let of = |name| ChannelProtocol::for_command(&[name], true).expect("known");
        let (binary, text, newest) = (of("v4.channel.k8s.io"), of("base64.channel.k8s.io"), of("v5.channel.k8s.io"));
        assert_eq!(binary.write(1, b"foo"), Message::Binary(Bytes::from_static(b"\x01foo")));
        assert_eq!(text.write(1, b"foo"), Message::Text("1Zm9v".into()));
        assert_eq!(text.write(2, b""), Message::Text("2".into()));
        let bytes = |bytes: &'static [u8]| ClientMessage::Channel(Bytes::from_static(bytes));
        let binary_message = |bytes: &'static [u8]| Message::Binary(Bytes::from_static(bytes));
        let rows = [
            (binary, binary_message(b"\0foo"), bytes(b"\0foo")),
            (binary, Message::Text("\0foo".into()), bytes(b"\0foo")),
            (binary, binary_message(&[255, 0]), ClientMessage::Nothing),
            (newest, binary_message(&[255, 0]), bytes(&[255, 0])),
            (binary, binary_message(b""), ClientMessage::Nothing),
            (text, Message::Text("0Zm9v".into()), bytes(b"\0foo")),
            (text, Message::Text("4".into()), bytes(b"\x04")),
            (text, Message::Text("0!".into()), ClientMessage::End),
            (text, Message::Close(None), ClientMessage::End),
            (binary, Message::Ping(Bytes::new()), ClientMessage::Nothing),
        ];
        for (protocol, message, expected) in rows {
            assert_eq!(protocol.read(message.clone()), expected, "{} {message:?}", protocol.name);
        }
    }
}
