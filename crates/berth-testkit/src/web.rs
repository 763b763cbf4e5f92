//! A web server that behaves badly.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

/// What the server answers.
#[derive(Clone)]
pub enum Answer {
    /// A status and a body.
    Plain(u16, String),
    /// Go there.
    Redirect(&'static str),
    /// Says nothing for ever.
    Hang,
    /// Promises 10 GB and sends as much as is taken.
    Endless,
    /// Nothing like HTTP.
    Garbage,
}

/// A server that has been told what to say.
pub struct Server {
    address: SocketAddr,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// The heads of requests, as they come.
    pub heads: mpsc::UnboundedReceiver<String>,
    /// Bytes of endless answers that were taken.
    pub sent: Arc<AtomicU64>,
}

impl Server {
    /// Answers in order; the last answer stays.
    pub async fn start(answers: impl IntoIterator<Item = Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let answers = Arc::new(Mutex::new(answers.into_iter().collect::<VecDeque<_>>()));
        let sent = Arc::new(AtomicU64::new(0));
        let (to_test, heads) = mpsc::unbounded_channel();
        let (queue, bytes) = (answers.clone(), sent.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, queue.clone(), bytes.clone(), to_test.clone()));
            }
        });
        Self { address, answers, heads, sent }
    }

    /// Where it answers.
    pub fn url(&self) -> String {
        format!("http://{}/pods", self.address)
    }

    /// Its port on loopback.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// One more answer.
    pub fn then(&self, answer: Answer) {
        self.answers.lock().expect("not poisoned").push_back(answer);
    }
}

async fn serve(
    stream: TcpStream,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    sent: Arc<AtomicU64>,
    heads: mpsc::UnboundedSender<String>,
) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let _ = heads.send(head);
    let answer = {
        let mut answers = answers.lock().expect("not poisoned");
        if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() }
    };
    let plain = |status: u16, more: &str, body: &str| {
        format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{more}\r\n{body}", body.len())
    };
    let text = match answer.expect("an answer") {
        Answer::Plain(status, body) => plain(status, "", &body),
        Answer::Redirect(to) => plain(302, &format!("Location: {to}\r\n"), ""),
        Answer::Hang => return std::future::pending().await,
        Answer::Garbage => "\u{1}\u{2}nothing like HTTP\r\n\r\n".to_owned(),
        Answer::Endless => {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 10737418240\r\n\r\n";
            let _ = stream.write_all(head.as_bytes()).await;
            let chunk = vec![b'#'; 64 * 1024];
            while stream.write_all(&chunk).await.is_ok() {
                sent.fetch_add(64 * 1024, Ordering::Relaxed);
            }
            return;
        }
    };
    let _ = stream.write_all(text.as_bytes()).await;
}

/// All is well.
pub fn ok(body: impl Into<String>) -> Answer {
    Answer::Plain(200, body.into())
}
