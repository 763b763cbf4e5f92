//! Two ends of a SPDY connection, and one end against raw bytes.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    ConnectionError, ConnectionLimits, Headers, IncomingStreams, Role, SpdyConnection, SpdyError, StreamClosed,
    frames::{self, Decoder, Encoder, ResetStatus, SpdyEvent},
    session,
};

const FREE: ConnectionLimits = ConnectionLimits { idle: None, ping: None, streams: 4 };

struct End {
    connection: SpdyConnection,
    incoming: IncomingStreams,
    task: JoinHandle<Result<(), ConnectionError>>,
}

fn end(io: DuplexStream, role: Role, limits: ConnectionLimits) -> End {
    let (connection, incoming, driver) = session(io, role, limits);
    End { connection, incoming, task: tokio::spawn(driver.run()) }
}

fn both() -> (End, End) {
    let (a, b) = duplex(64 << 10);
    (end(a, Role::Client, FREE), end(b, Role::Server, FREE))
}

/// Server, and the raw end of its connection.
fn against(limits: ConnectionLimits) -> (End, DuplexStream) {
    let (a, b) = duplex(1 << 20);
    (end(b, Role::Server, limits), a)
}

/// Events that a server sends until it is silent for a moment of paused time.
async fn sent_events(raw: &mut DuplexStream) -> Vec<SpdyEvent> {
    let (mut decoder, mut input, mut events) = (Decoder::default(), BytesMut::new(), Vec::new());
    while let Ok(Ok(read)) = timeout(Duration::from_millis(1), raw.read_buf(&mut input)).await {
        while let Some(event) = decoder.decode(&mut input).expect("well-formed") {
            events.push(event);
        }
        if read == 0 {
            break;
        }
    }
    events
}

fn opened(encoder: &mut Encoder, streams: &[u32]) -> BytesMut {
    let mut out = BytesMut::new();
    for stream in streams {
        encoder.syn_stream(*stream, &Headers::of(&[("streamType", "data")]), &mut out).expect("packed");
    }
    out
}

#[tokio::test]
async fn streams_carry_bytes_both_ways_and_half_close() {
    let (client, mut server) = both();
    let mut ours = client.connection.open(Headers::of(&[("streamType", "stdin")])).await.expect("open");
    let mut theirs = server.incoming.recv().await.expect("a stream");
    assert_eq!((theirs.id(), theirs.headers().get("streamtype")), (1, Some("stdin")));
    theirs.accept().await.expect("sent");
    ours.accepted().await.expect("accepted");
    ours.write(Bytes::from(vec![b'x'; 100_000])).await.expect("sent");
    ours.finish().await.expect("sent");
    assert_eq!(ours.write(Bytes::from_static(b"late")).await, Err(StreamClosed::Gone));
    let mut got = 0;
    while let Some(bytes) = theirs.read().await.expect("whole") {
        got += bytes.len();
    }
    assert_eq!(got, 100_000);
    theirs.write(Bytes::from_static(b"answer")).await.expect("the other half is open");
    drop(theirs); // the reset follows the written data, in the same queue
    assert_eq!(ours.read().await, Ok(Some(Bytes::from_static(b"answer"))));
    assert_eq!(ours.read().await, Err(StreamClosed::Reset(5)));

    let mut refused = client.connection.open(Headers::default()).await.expect("open");
    drop(server.incoming.recv().await.expect("a stream"));
    assert_eq!(refused.accepted().await, Err(StreamClosed::Reset(5)));

    let mut last = client.connection.open(Headers::default()).await.expect("open");
    let theirs = server.incoming.recv().await.expect("a stream");
    theirs.write(Bytes::from_static(b"last words")).await.expect("sent");
    server.connection.close();
    assert_eq!(last.read().await, Ok(Some(Bytes::from_static(b"last words"))), "what waits is written");
    assert!(last.read().await.is_err());
    server.task.await.expect("no panic").expect("wanted");
    client.task.await.expect("no panic").expect("the peer wanted it");
    assert!(client.connection.open(Headers::default()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn an_unread_stream_keeps_so_much_and_no_more() {
    let (client, mut server) = both();
    let ours = client.connection.open(Headers::default()).await.expect("open");
    let mut theirs = server.incoming.recv().await.expect("a stream");
    let mut sent = 0;
    let piece = Bytes::from(vec![b'x'; 8 << 10]);
    while timeout(Duration::from_secs(1), ours.write(piece.clone())).await.is_ok() {
        sent += piece.len();
        assert!(sent < 2 << 20, "somebody keeps it all");
    }
    assert!(sent >= 256 << 10);
    // Reading frees the queue for the rest.
    let mut got = 0;
    while let Ok(read) = timeout(Duration::from_secs(1), theirs.read()).await {
        got += read.expect("whole").expect("more").len();
    }
    assert_eq!(got, sent);
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_connection() {
    let began = Instant::now();
    let limits = ConnectionLimits { idle: Some(Duration::from_secs(60)), ..FREE };
    let (server, mut raw) = against(limits);
    tokio::time::sleep(Duration::from_secs(40)).await;
    let mut ping = BytesMut::new();
    frames::ping(1, &mut ping);
    raw.write_all(&ping).await.expect("taken");
    assert_eq!(sent_events(&mut raw).await, [SpdyEvent::Ping(1)]);
    let ended = server.task.await.expect("no panic");
    assert!(matches!(ended, Err(ConnectionError::Idle(_))), "{ended:?}");
    assert_eq!(began.elapsed().as_secs(), 100);
    assert_eq!(sent_events(&mut raw).await, [SpdyEvent::GoAway]);
}

#[tokio::test(start_paused = true)]
async fn a_client_asks_whether_its_server_is_there() {
    let (io, mut raw) = duplex(1 << 10);
    let _client = end(io, Role::Client, ConnectionLimits { ping: Some(Duration::from_secs(5)), ..FREE });
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(sent_events(&mut raw).await, [SpdyEvent::Ping(1), SpdyEvent::Ping(3)]);
}

#[tokio::test(start_paused = true)]
async fn streams_beyond_the_limit_and_out_of_order_are_refused() {
    let (mut server, mut raw) = against(FREE);
    let mut encoder = Encoder::default();
    raw.write_all(&opened(&mut encoder, &[1, 3, 5, 7, 9])).await.expect("taken");
    assert_eq!(
        sent_events(&mut raw).await,
        [SpdyEvent::Reset { stream: 9, status: ResetStatus::RefusedStream as u32 }]
    );
    raw.write_all(&opened(&mut encoder, &[4, 9, 1])).await.expect("taken");
    let wrong = |stream| SpdyEvent::Reset { stream, status: ResetStatus::ProtocolError as u32 };
    assert_eq!(sent_events(&mut raw).await, [wrong(4), wrong(9), wrong(1)]);
    let mut unknown = BytesMut::new();
    frames::data_head(99, 3, true, &mut unknown);
    unknown.extend_from_slice(b"foo");
    raw.write_all(&unknown).await.expect("taken");
    assert_eq!(sent_events(&mut raw).await, [], "data of a stream nobody opened is dropped");
    assert_eq!(server.incoming.recv().await.map(|stream| stream.id()), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_broken_protocol_ends_the_connection() {
    let (mut server, mut raw) = against(FREE);
    raw.write_all(&opened(&mut Encoder::default(), &[1])).await.expect("taken");
    let mut stream = server.incoming.recv().await.expect("a stream");
    raw.write_all(&[0x80, 2, 0, 1, 0, 0, 0, 0]).await.expect("taken");
    assert_eq!(stream.read().await, Err(StreamClosed::Gone));
    let ended = server.task.await.expect("no panic");
    assert!(matches!(ended, Err(ConnectionError::Protocol(SpdyError::Version(2)))), "{ended:?}");
}

#[tokio::test]
async fn data_sent_before_the_peer_closed_is_delivered() {
    // Whether the read or the write detects it first is random.
    for _ in 0..50 {
        let (ours, mut raw) = duplex(1 << 20);
        let (connection, _incoming, driver) = session(ours, Role::Client, FREE);
        let mut stream = connection.open(Headers::of(&[("streamType", "error")])).await.expect("there is room");
        let mut out = BytesMut::new();
        Encoder::default().syn_reply(1, &mut out).expect("packed");
        frames::data_head(1, 6, false, &mut out);
        out.extend_from_slice(b"exit 7");
        raw.write_all(&out).await.expect("taken");
        drop(raw);
        let task = tokio::spawn(driver.run());
        assert_eq!(stream.read().await, Ok(Some(Bytes::from_static(b"exit 7"))));
        assert_eq!(stream.read().await, Err(StreamClosed::Gone));
        let _ = task.await.expect("no panic"); // either direction may have detected it first
    }
}
