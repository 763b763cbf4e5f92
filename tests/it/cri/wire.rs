//! Scripted gRPC server on a Unix socket with a fixed response per method.
//!
//! Any other method gets `Unimplemented`, as from a server without the service.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, body::Body, extract::Request, response::Response, routing::any};
use berth_proto::cri;
use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use prost::Message;
use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime};
use tokio_stream::wrappers::UnixListenerStream;

#[derive(Clone)]
pub enum Answer {
    Reply(Bytes),
    Refused(u32, String),
    Hang,
    /// Returns the size of the request in bytes, as the output of an exec.
    Size,
    /// The beginning of a response, then an end without a status.
    Truncated,
}

impl Answer {
    pub fn ok(message: &impl Message) -> Self {
        let body = message.encode_to_vec();
        let mut framed = BytesMut::new();
        framed.put_u8(0);
        framed.put_u32(u32::try_from(body.len()).expect("small"));
        framed.extend_from_slice(&body);
        Self::Reply(framed.freeze())
    }

    pub fn refused(code: u32, message: &str) -> Self {
        Self::Refused(code, message.to_owned())
    }
}

pub struct Server {
    answers: HashMap<String, Answer>,
    streams: Option<u32>,
}

pub struct RunningServer {
    socket: PathBuf,
    dir: Option<TempDir>,
    calls: Arc<Mutex<HashMap<String, usize>>>,
    connections: Arc<AtomicUsize>,
    canceled: Arc<AtomicUsize>,
    // Its own runtime, so that stopping it also ends connections.
    runtime: Option<Runtime>,
}

impl Server {
    pub fn new() -> Self {
        Self { answers: HashMap::new(), streams: None }
    }

    /// Limits the concurrent calls per connection.
    pub fn streams(mut self, streams: u32) -> Self {
        self.streams = Some(streams);
        self
    }

    pub fn on(mut self, method: &str, answer: Answer) -> Self {
        self.answers.insert(format!("/runtime.v1.{method}"), answer);
        self
    }

    pub async fn start(self) -> RunningServer {
        self.start_at(tempfile::tempdir().expect("a directory")).await
    }

    pub async fn start_at(self, dir: TempDir) -> RunningServer {
        let socket = dir.path().join("cri.sock");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(&socket).expect("a socket")
        };
        let calls: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let (connections, given_up) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (answers, counted, left) = (Arc::new(self.answers), calls.clone(), given_up.clone());
        let handler = move |request: Request| {
            let (answers, counted, left) = (answers.clone(), counted.clone(), left.clone());
            async move {
                let path = request.uri().path().to_owned();
                *counted.lock().expect("lock").entry(path.clone()).or_default() += 1;
                answer(answers.get(&path), request, left).await
            }
        };
        let made = connections.clone();
        let incoming = UnixListenerStream::new(listener).inspect(move |_| {
            made.fetch_add(1, Ordering::Relaxed);
        });
        runtime.spawn(
            tonic::transport::Server::builder()
                .max_concurrent_streams(self.streams)
                .add_routes(Router::new().fallback(any(handler)).into())
                .serve_with_incoming(incoming),
        );
        RunningServer { socket, dir: Some(dir), calls, connections, canceled: given_up, runtime: Some(runtime) }
    }
}

impl RunningServer {
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn calls(&self, method: &str) -> usize {
        self.calls.lock().expect("lock").get(&format!("/runtime.v1.{method}")).copied().unwrap_or(0)
    }

    /// Number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Number of calls that the client canceled before a response.
    pub fn given_up(&self) -> usize {
        self.canceled.load(Ordering::Relaxed)
    }

    /// Stops the server with all its connections and removes its socket.
    pub fn stop(mut self) -> TempDir {
        let runtime = self.runtime.take().expect("running");
        std::thread::spawn(move || drop(runtime)).join().expect("ends");
        std::fs::remove_file(&self.socket).expect("the socket goes");
        self.dir.take().expect("kept")
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Increments a counter when it is dropped.
struct DropCounter(Arc<AtomicUsize>);

impl Drop for DropCounter {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

async fn answer(answer: Option<&Answer>, request: Request, left: Arc<AtomicUsize>) -> Response {
    let response = http::Response::builder().header("content-type", "application/grpc");
    let refused = |code: u32, message: &str| {
        let response = http::Response::builder().header("content-type", "application/grpc");
        response.header("grpc-status", code).header("grpc-message", message).body(Body::empty()).expect("a response")
    };
    let ended = Frame::trailers(http::HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )]));
    let frames = match answer {
        None => return refused(12, ""),
        Some(Answer::Refused(code, message)) => return refused(*code, message),
        Some(Answer::Hang) => {
            let _left = DropCounter(left);
            std::future::pending().await
        }
        Some(Answer::Reply(bytes)) => vec![Ok(Frame::data(bytes.clone())), Ok(ended)],
        Some(Answer::Truncated) => vec![Ok(Frame::data(Bytes::from_static(&[0; 3]))), Err("torn")],
        Some(Answer::Size) => {
            let size = request.into_body().collect().await.map_or(0, |body| body.to_bytes().len());
            let written = cri::ExecSyncResponse { stdout: size.to_string().into_bytes(), ..Default::default() };
            let Answer::Reply(bytes) = Answer::ok(&written) else { unreachable!("just made") };
            vec![Ok(Frame::data(bytes)), Ok(ended)]
        }
    };
    response.body(Body::new(StreamBody::new(futures::stream::iter(frames)))).expect("a response")
}
