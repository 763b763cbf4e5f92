//! Calls against a scripted HTTP/2 server.

use std::time::Duration;

use tokio::time::timeout;
use tonic::Request as Call;

use super::*;

const ADDRESS: &str = "http://localhost/a.B/C";
const TEXT: &str = "what is said";

/// Behavior of the server for a call.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Sends these bytes in chunks of this size, then this gRPC status, if any.
    Says(&'static [u8], usize, Option<(&'static str, &'static str)>),
    /// Sends only a gRPC status.
    Refuses(&'static str, &'static str),
    /// Responds as an HTTP server without gRPC.
    Http(u16),
    /// Sends the message, then a reset.
    Resets(Reason),
    /// Sends more than the maximum size of a response.
    Babbles,
    /// Closes the connection.
    Leaves,
}

/// Serves each connection with the next of these behaviors; returns the client and the received requests.
fn served(all: Vec<Does>) -> (Direct, Arc<Mutex<Vec<Request<Bytes>>>>) {
    let (heard, next) = (Arc::<Mutex<Vec<Request<Bytes>>>>::default(), Arc::new(Mutex::new(all.into_iter())));
    let tells = heard.clone();
    let make: MakePipe = Arc::new(move || {
        let (here, there) = tokio::io::duplex(1 << 20);
        let does = next.lock().expect("no panic").next();
        let tells = tells.clone();
        if let Some(does) = does {
            tokio::spawn(serve(there, does, tells));
        }
        let made: Result<Box<dyn Pipe>, String> = does.map(|_| Box::new(here) as _).ok_or("nobody".to_owned());
        std::future::ready(made).boxed()
    });
    (Direct::new(make), heard)
}

async fn serve(pipe: tokio::io::DuplexStream, does: Does, tells: Arc<Mutex<Vec<Request<Bytes>>>>) {
    let mut connection = h2::server::handshake(pipe).await.expect("a client");
    let mut pings = connection.ping_pong();
    while let Some(Ok((request, mut reply))) = connection.accept().await {
        let (tells, pings) = (tells.clone(), pings.take());
        let answering = async move {
            let (head, mut body) = request.into_parts();
            let mut said = Vec::new();
            while let Some(data) = body.data().await {
                said.extend_from_slice(&data.expect("a request"));
            }
            tells.lock().expect("no panic").push(Request::from_parts(head, said.into()));
            let head = Response::builder();
            let of = |(code, text): (&str, &str)| {
                let mut told = HeaderMap::new();
                told.insert("grpc-status", code.parse().expect("a value"));
                told.insert("grpc-message", text.parse().expect("a value"));
                told
            };
            match does {
                Does::Says(bytes, size, status) => {
                    let mut rest = reply.send_response(head.body(()).expect("a head"), false).expect("sent");
                    for piece in bytes.chunks(size) {
                        rest.send_data(Bytes::from_static(piece), false).expect("sent");
                    }
                    match status {
                        Some(status) => rest.send_trailers(of(status)).expect("sent"),
                        None => rest.send_data(Bytes::new(), true).expect("sent"),
                    }
                }
                Does::Refuses(code, text) => {
                    let mut head = head.body(()).expect("a head");
                    *head.headers_mut() = of((code, text));
                    reply.send_response(head, true).expect("sent");
                }
                Does::Http(status) => {
                    reply.send_response(head.status(status).body(()).expect("a head"), true).expect("sent");
                }
                Does::Resets(reason) => {
                    let mut rest = reply.send_response(head.body(()).expect("a head"), false).expect("sent");
                    rest.send_data(framed(&TEXT.to_owned()).expect("short"), false).expect("sent");
                    // Data that is not sent yet would be lost with the stream. A ping overtakes it, a second one does
                    // not.
                    let mut pings = pings.expect("the first call of a connection");
                    for _ in 0..2 {
                        pings.ping(h2::Ping::opaque()).await.expect("the other side lives");
                    }
                    rest.send_reset(reason);
                }
                Does::Babbles => {
                    let mut rest = reply.send_response(head.body(()).expect("a head"), false).expect("sent");
                    rest.reserve_capacity(1 << 20);
                    while let Some(Ok(room)) = std::future::poll_fn(|context| rest.poll_capacity(context)).await {
                        if rest.send_data(vec![0; room].into(), false).is_err() {
                            break;
                        }
                        rest.reserve_capacity(1 << 20);
                    }
                }
                Does::Leaves => {}
            }
        };
        if matches!(does, Does::Leaves) {
            answering.await;
            return;
        }
        tokio::spawn(answering);
    }
}

async fn call(direct: &Direct) -> Result<String, (Code, String)> {
    let mut call = Call::new(TEXT.to_owned());
    call.set_timeout(Duration::from_secs(7));
    let answer = timeout(Duration::from_secs(30), direct.unary::<String, String>(ADDRESS, call)).await;
    let answer = answer.expect("an answer in time");
    answer.map(tonic::Response::into_inner).map_err(|status| (status.code(), status.message().to_owned()))
}

const WHOLE: &[u8] = b"\0\0\0\0\x0e\x0a\x0cwhat is said";

#[tokio::test]
async fn a_call_is_one_message_there_and_one_back() {
    let (direct, heard) = served(vec![Does::Says(WHOLE, 7, Some(("0", "")))]);
    for _ in 0..2 {
        assert_eq!(call(&direct).await.as_deref(), Ok(TEXT));
    }
    for request in heard.lock().expect("no panic").iter() {
        assert_eq!((request.method(), request.uri().to_string().as_str()), (&Method::POST, ADDRESS));
        let told = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        assert_eq!(told("te"), Some("trailers"));
        assert_eq!(told("content-type"), Some("application/grpc"));
        assert_eq!(told("grpc-timeout"), Some("7000000u"));
        assert_eq!(request.body(), WHOLE);
    }
    assert_eq!(heard.lock().expect("no panic").len(), 2);
}

#[tokio::test]
async fn an_answer_is_what_its_status_says_and_else_what_is_there() {
    let fails = |code, text: &str| Err((code, text.to_owned()));
    let odd = "the answer is not one message that is not compressed";
    for (does, expected) in [
        (Does::Says(WHOLE, 1, Some(("0", ""))), Ok(TEXT.to_owned())),
        (Does::Says(b"\0\0\0\0\0", 9, Some(("0", ""))), Ok(String::new())),
        (Does::Says(WHOLE, 99, None), Ok(TEXT.to_owned())),
        (Does::Resets(Reason::NO_ERROR), Ok(TEXT.to_owned())),
        (Does::Says(WHOLE, 99, Some(("4", "too%20late"))), fails(Code::DeadlineExceeded, "too late")),
        (Does::Says(b"", 9, Some(("2", "oh"))), fails(Code::Unknown, "oh")),
        (Does::Refuses("5", "not found"), fails(Code::NotFound, "not found")),
        (Does::Refuses("0", ""), fails(Code::Internal, "Missing response message.")),
        (Does::Says(b"", 9, Some(("0", ""))), fails(Code::Internal, "Missing response message.")),
        (Does::Http(200), fails(Code::Internal, "Missing response message.")),
        (Does::Http(404), fails(Code::Unknown, "HTTP status 404 Not Found")),
        (Does::Says(b"\x01\0\0\0\0", 9, Some(("0", ""))), fails(Code::Internal, odd)),
        (Does::Says(b"\0\0\0\0\x02\x0a", 9, Some(("0", ""))), fails(Code::Internal, odd)),
        (Does::Says(b"\0\0\0\0\0\0", 9, Some(("0", ""))), fails(Code::Internal, odd)),
        (Does::Says(b"\0\0", 9, Some(("0", ""))), fails(Code::Internal, odd)),
        (Does::Babbles, fails(Code::OutOfRange, "the answer is longer than 16777216 bytes")),
    ] {
        let (direct, _) = served(vec![does]);
        assert_eq!(call(&direct).await, expected, "{does:?}");
    }
    let garbage = Does::Says(b"\0\0\0\0\x03\x0a\x09\xff", 9, Some(("0", "")));
    for does in [garbage, Does::Resets(Reason::INTERNAL_ERROR)] {
        let (direct, _) = served(vec![does]);
        assert_eq!(call(&direct).await.map_err(|(code, _)| code), Err(Code::Internal), "{does:?}");
    }
}

#[tokio::test]
async fn another_connection_is_made_where_there_is_none_any_more() {
    let says = Does::Says(WHOLE, 99, Some(("0", "")));
    let (direct, heard) = served(vec![Does::Leaves, says]);
    let (code, _) = call(&direct).await.expect_err("it has left");
    assert!(matches!(code, Code::Unknown | Code::Unavailable | Code::Internal), "{code:?}");
    assert_eq!(call(&direct).await.as_deref(), Ok(TEXT));
    assert_eq!(heard.lock().expect("no panic").len(), 2);
    let (nobody, _) = served(vec![]);
    assert_eq!(call(&nobody).await, Err((Code::Unavailable, "nobody".to_owned())));
}
