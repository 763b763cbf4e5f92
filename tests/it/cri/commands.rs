//! ExecSync: concurrent calls, large outputs, refusals, and runtimes that go and come.

use std::time::Duration;

use berth_cri::{CriError, CriResult, ExecOutput, RuntimeClient, RuntimeService};
use berth_proto::cri;
use futures::future::join_all;
use tonic::Code;

use crate::cri::{
    client,
    wire::{Answer, Server},
};

const EXEC: &str = "RuntimeService/ExecSync";

async fn run(runtime: &RuntimeClient, argument: &str) -> CriResult<ExecOutput> {
    runtime.exec_sync("c", &[argument.to_owned()], Duration::from_secs(60), usize::MAX).await
}

fn written(stdout: Vec<u8>) -> Answer {
    Answer::ok(&cri::ExecSyncResponse { stdout, ..Default::default() })
}

#[tokio::test]
async fn commands_at_the_same_time_share_a_connection_and_wait_for_room_on_it() {
    let running = Server::new().on(EXEC, Answer::Size).streams(10).start().await;
    let (connection, _) = client(running.socket());
    for _ in 0..2 {
        let answers = join_all((0..200).map(|_| run(&connection.runtime, "x"))).await;
        // Five bytes of the frame, three of the id, three of the argument, two of the timeout.
        let expected = Ok(ExecOutput { stdout: b"13".to_vec(), stderr: Vec::new() });
        assert!(answers.iter().all(|answer| *answer == expected), "{answers:?}");
    }
    assert_eq!((running.calls(EXEC), running.connections()), (400, 1));
}

#[tokio::test]
async fn a_missing_runtime_is_reported_as_in_other_calls_and_found_when_it_starts() {
    let dir = tempfile::tempdir().expect("a directory");
    let (connection, _) = client(&dir.path().join("cri.sock"));
    let other = connection.runtime.version("").await.expect_err("nobody there");
    let both = tokio::join!(run(&connection.runtime, "x"), run(&connection.runtime, "y"));
    assert_eq!(both, (Err(other.clone()), Err(other)));

    let mut dir = Some(dir);
    for _ in 0..2 {
        let running = Server::new().on(EXEC, written(b"out".to_vec())).start_at(dir.take().expect("kept")).await;
        let found = tokio::time::timeout(Duration::from_secs(10), async {
            // Attempts to connect within the back-off fail fast.
            while run(&connection.runtime, "x").await.is_err() {
                tokio::task::yield_now().await;
            }
        });
        found.await.expect("found");
        assert_eq!(running.connections(), 1);
        dir = Some(running.stop());
        let error = run(&connection.runtime, "x").await.expect_err("gone");
        assert!(error.is_unavailable(), "{error}");
    }
}

#[tokio::test]
async fn what_is_large_is_taken_whole_and_what_is_too_large_is_refused() {
    let running = Server::new().on(EXEC, Answer::Size).start().await;
    let (connection, _) = client(running.socket());
    let output = run(&connection.runtime, &"x".repeat(1 << 20)).await.expect("an answer");
    assert_eq!(output.stdout, ((1 << 20) + 5 + 3 + 4 + 2).to_string().into_bytes());

    for (size, is_taken) in [(3 << 20, true), (17 << 20, false)] {
        let running = Server::new().on(EXEC, written(vec![b'o'; size])).start().await;
        let (connection, _) = client(running.socket());
        match run(&connection.runtime, "x").await {
            Ok(output) => assert!(is_taken && output.stdout.len() == size, "{size}: {}", output.stdout.len()),
            Err(CriError::Rpc { code, .. }) => assert!(!is_taken && code == Code::OutOfRange, "{size}: {code}"),
            Err(error) => panic!("{size}: {error}"),
        }
    }
}

#[tokio::test]
async fn refusals_keep_their_code_and_an_answer_that_is_torn_is_none() {
    let running = Server::new().on(EXEC, Answer::refused(5, "no container c")).start().await;
    let (connection, _) = client(running.socket());
    let refused = CriError::Rpc { code: Code::NotFound, message: "no container c".to_owned() };
    assert_eq!(run(&connection.runtime, "x").await, Err(refused));

    let running = Server::new().on(EXEC, Answer::Truncated).start().await;
    let (connection, _) = client(running.socket());
    let error = run(&connection.runtime, "x").await.expect_err("torn");
    assert!(error.is_unavailable(), "{error}");
    assert!(run(&connection.runtime, "x").await.is_err_and(|error| error.is_unavailable()));
    assert_eq!(running.connections(), 1, "only the call was broken");
}

#[tokio::test]
async fn a_dropped_call_is_canceled_at_the_runtime() {
    let running = Server::new().on(EXEC, Answer::Hang).start().await;
    let (connection, _) = client(running.socket());
    let reached = async {
        while running.calls(EXEC) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answer = run(&connection.runtime, "x") => panic!("it hangs: {answer:?}"),
        () = reached => {}
    }
    let learnt = tokio::time::timeout(Duration::from_secs(10), async {
        while running.given_up() == 0 {
            tokio::task::yield_now().await;
        }
    });
    learnt.await.expect("received");
}
