//! SPDY and WebSocket clients for exec, attach, and port-forward tests.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use berth_server::streaming::spdy::{
    ConnectionLimits, Headers, IncomingStreams, Role, SpdyConnection, SpdyStream, session,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, tungstenite, tungstenite::Message};

/// Deadline of every wait.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Address of a streaming listener.
#[derive(Clone, Copy)]
pub struct StreamEndpoint(pub SocketAddr);

impl StreamEndpoint {
    /// Sends a request; returns the response head and the connection.
    pub async fn request(&self, head: &str) -> (Head, TcpStream) {
        let mut tcp = TcpStream::connect(self.0).await.expect("failed to connect");
        tcp.write_all(format!("{head}\r\nHost: node\r\n\r\n").as_bytes()).await.expect("sent");
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            let byte = timeout(LIMIT, tcp.read_u8())
                .await
                .expect("timed out waiting for a response")
                .expect("failed to read the response");
            text.push(byte);
        }
        (Head::read(&String::from_utf8(text).expect("text")), tcp)
    }

    /// Sends a request with a regular response; returns status and body.
    pub async fn ask(&self, head: &str) -> (u16, String) {
        let (head, mut tcp) = self.request(&format!("{head}\r\nX-Test: 1")).await;
        let length: usize = head
            .header("content-length")
            .first()
            .expect("response without Content-Length")
            .parse()
            .expect("invalid number");
        let mut body = vec![0; length];
        timeout(LIMIT, tcp.read_exact(&mut body)).await.expect("timed out").expect("failed to read the body");
        (head.status, String::from_utf8(body).expect("text"))
    }

    /// Upgrades to SPDY.
    pub async fn spdy(&self, target: &str, protocols: &[&str]) -> Spdy {
        let (head, tcp) = self.request(&spdy_head(target, protocols)).await;
        assert_eq!(head.status, 101, "{head:?}");
        Spdy::over(head, tcp)
    }

    /// Upgrades to a WebSocket.
    pub async fn web_socket(&self, target: &str, protocols: &str) -> (Head, WebSocketStream<TcpStream>) {
        let (head, tcp) = self.request(&web_socket_head(target, protocols)).await;
        assert_eq!(head.status, 101, "{head:?}");
        (head, WebSocketStream::from_raw_socket(tcp, tungstenite::protocol::Role::Client, None).await)
    }
}

/// Head of a SPDY upgrade request, without its last lines.
pub fn spdy_head(target: &str, protocols: &[&str]) -> String {
    let lines: String = protocols.iter().map(|p| format!("\r\nX-Stream-Protocol-Version: {p}")).collect();
    format!("POST {target} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0{lines}")
}

/// Head of a WebSocket upgrade request, without its last lines.
pub fn web_socket_head(target: &str, protocols: &str) -> String {
    let line = if protocols.is_empty() { String::new() } else { format!("\r\nSec-WebSocket-Protocol: {protocols}") };
    format!(
        "GET {target} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=={line}"
    )
}

/// Command as query parameters, with a leading `&`.
pub fn words(words: &[&str]) -> String {
    let spelled = words
        .iter()
        .flat_map(|word| ["&command=".to_owned(), form_urlencoded::byte_serialize(word.as_bytes()).collect()]);
    spelled.collect()
}

/// Head of a response.
#[derive(Debug)]
pub struct Head {
    /// HTTP status.
    pub status: u16,
    lines: Vec<(String, String)>,
}

impl Head {
    fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1))
            .expect("response without status")
            .parse()
            .expect("invalid number");
        let pairs = lines.filter_map(|line| line.split_once(": "));
        Self { status, lines: pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect() }
    }

    /// All values of a header, by its name in lower case.
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.lines.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// SPDY client.
pub struct Spdy {
    /// Head of the upgrade response.
    pub head: Head,
    /// SPDY connection, which opens streams.
    pub connection: SpdyConnection,
    /// Task that drives the connection.
    pub task: JoinHandle<()>,
    /// Keeps the receiver of incoming streams alive; servers open none.
    _incoming: IncomingStreams,
}

impl Spdy {
    /// Runs SPDY over any connection.
    pub fn over<T: AsyncRead + AsyncWrite + Send + 'static>(head: Head, io: T) -> Self {
        let (connection, incoming, driver) =
            session(io, Role::Client, ConnectionLimits { idle: None, ping: None, streams: 4096 });
        let task = tokio::spawn(async move {
            let _ = driver.run().await;
        });
        Self { head, connection, task, _incoming: incoming }
    }

    /// Tunnels SPDY through a WebSocket, in messages that ignore frame boundaries.
    pub fn within(head: Head, socket: WebSocketStream<TcpStream>) -> Self {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let (mut from, mut to) = tokio::io::split(theirs);
        let (mut send, mut receive) = socket.split();
        tokio::spawn(async move {
            let mut buffer = vec![0; 777]; // an odd size, so that frames span messages
            while let Ok(read @ 1..) = from.read(&mut buffer).await {
                if send.send(Message::Binary(Bytes::copy_from_slice(&buffer[..read]))).await.is_err() {
                    break;
                }
            }
        });
        tokio::spawn(async move {
            while let Some(Ok(Message::Binary(bytes))) = receive.next().await {
                to.write_all(&bytes).await.expect("taken");
            }
        });
        Self::over(head, ours)
    }

    /// Opens a stream and waits until it is accepted.
    pub async fn open(&self, headers: &[(&str, &str)]) -> SpdyStream {
        let mut stream = self.connection.open(Headers::of(headers)).await.expect("open");
        timeout(LIMIT, stream.accepted()).await.expect("timed out").expect("accepted");
        stream
    }

    /// Opens one stream of a command.
    pub async fn stream(&self, kind: &str) -> SpdyStream {
        self.open(&[("streamType", kind)]).await
    }

    /// Opens the streams of a command.
    pub async fn command(&self, kinds: &[&'static str]) -> BTreeMap<&'static str, SpdyStream> {
        let mut streams = BTreeMap::new();
        for kind in kinds {
            streams.insert(*kind, self.stream(kind).await);
        }
        streams
    }

    /// Opens the stream pair of a port: data, error.
    pub async fn pair(&self, port: u16, request: &str) -> (SpdyStream, SpdyStream) {
        let port = port.to_string();
        let mut error = self.open(&[("port", &port), ("streamType", "error"), ("requestID", request)]).await;
        error.finish().await.expect("sent");
        (self.open(&[("port", &port), ("streamType", "data"), ("requestID", request)]).await, error)
    }
}

/// Reads a stream to its end or failure.
pub async fn all(stream: &mut SpdyStream) -> String {
    let mut bytes = Vec::new();
    while let Ok(Some(more)) = timeout(LIMIT, stream.read()).await.expect("timed out") {
        bytes.extend_from_slice(&more);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads a stream until `wanted` appears.
pub async fn up_to(stream: &mut SpdyStream, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let more = timeout(LIMIT, stream.read()).await;
        let more = more.unwrap_or_else(|_| panic!("timed out waiting for {wanted:?}, received {text:?}"));
        text += &String::from_utf8_lossy(
            &more.expect("whole").unwrap_or_else(|| panic!("stream closed, received {text:?}")),
        );
    }
    text
}

/// Payload of the next binary or text message.
pub async fn next(socket: &mut WebSocketStream<TcpStream>) -> Vec<u8> {
    loop {
        match timeout(LIMIT, socket.next()).await.expect("timed out") {
            Some(Ok(Message::Binary(bytes))) => return bytes.to_vec(),
            Some(Ok(Message::Text(text))) => return text.as_bytes().to_vec(),
            Some(Ok(Message::Ping(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Reads messages of channels 1 to 3 to the end; returns the text of each channel.
pub async fn channels(socket: &mut WebSocketStream<TcpStream>) -> [String; 3] {
    let mut all = [const { Vec::new() }; 3];
    while let Some(Ok(message)) = timeout(LIMIT, socket.next()).await.expect("timed out") {
        if let Message::Binary(bytes) = message {
            all[usize::from(bytes[0]) - 1].extend_from_slice(&bytes[1..]);
        }
    }
    all.map(|bytes| String::from_utf8(bytes).expect("text"))
}

/// Sends a binary message.
pub async fn send_message(socket: &mut WebSocketStream<TcpStream>, message: &[u8]) {
    socket.send(Message::Binary(Bytes::copy_from_slice(message))).await.expect("sent");
}

/// Waits until the WebSocket has closed.
pub async fn ended(socket: &mut WebSocketStream<TcpStream>) {
    while let Some(Ok(_)) = timeout(LIMIT, socket.next()).await.expect("timed out waiting for the close") {}
}
