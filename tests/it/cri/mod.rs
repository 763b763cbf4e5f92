//! CRI client against a gRPC server on a Unix socket: wire format, deadlines, errors, and probes.
//!
//! Also covers validation and the start-up probes (spec 03a §2.1-2.2).

mod commands;
mod real;
mod wire;

use std::{path::Path, time::Duration};

use berth_cri::{
    CriClients, CriConfig, CriError, ExecOutput, ImageService, ProbeError, RuntimeCgroupDriver, RuntimeService,
    connect, probe,
};
use berth_metrics::Registry;
use berth_proto::cri;
use futures::StreamExt;
use tonic::Code;
use wire::{Answer, Server};

const T: Duration = Duration::from_millis(300);

fn client(socket: &Path) -> (CriClients, Registry) {
    let config = CriConfig {
        endpoint: format!("unix://{}", socket.display()),
        image_endpoint: String::new(),
        request_timeout: T,
        list_streaming: false,
    };
    let registry = Registry::new();
    (connect(&config, &registry).expect("a unix endpoint"), registry)
}

fn version() -> cri::VersionResponse {
    cri::VersionResponse {
        version: "0.1.0".into(),
        runtime_name: "containerd".into(),
        runtime_version: "2.2.0".into(),
        runtime_api_version: "v1".into(),
    }
}

/// A runtime that passes every start-up probe.
fn healthy() -> Server {
    Server::new()
        .on("RuntimeService/Version", Answer::ok(&version()))
        .on("ImageService/ImageFsInfo", Answer::ok(&cri::ImageFsInfoResponse::default()))
        .on("RuntimeService/RuntimeConfig", driver(0))
}

fn driver(cgroup_driver: i32) -> Answer {
    let linux = cri::LinuxRuntimeConfiguration { cgroup_driver };
    Answer::ok(&cri::RuntimeConfigResponse { linux: Some(linux) })
}

async fn probed(server: Server) -> (Result<berth_cri::RuntimeInfo, ProbeError>, Registry) {
    let running = server.start().await;
    let (connection, registry) = client(running.socket());
    (probe(&connection, &registry, Duration::ZERO).await, registry)
}

fn has_family(registry: &Registry, name: &str) -> bool {
    registry.gather().iter().any(|family| family.name() == name)
}

#[tokio::test]
async fn a_healthy_runtime_passes() {
    let (info, registry) = probed(healthy()).await;
    let info = info.expect("all probes pass");
    assert_eq!((&*info.name, info.version.as_str()), ("containerd", "2.2.0"));
    assert_eq!(info.cgroup_driver, RuntimeCgroupDriver::Systemd);
    assert!(has_family(&registry, "kubelet_runtime_operations_total"));
    assert!(!has_family(&registry, "kubelet_cri_losing_support"));
}

#[tokio::test]
async fn the_cgroup_driver_is_the_one_of_the_runtime() {
    let (info, _) = probed(healthy().on("RuntimeService/RuntimeConfig", driver(1))).await;
    assert_eq!(info.expect("passes").cgroup_driver, RuntimeCgroupDriver::Cgroupfs);
    let nothing = Answer::ok(&cri::RuntimeConfigResponse { linux: None });
    let (info, _) = probed(healthy().on("RuntimeService/RuntimeConfig", nothing)).await;
    assert_eq!(info.expect("passes").cgroup_driver, RuntimeCgroupDriver::AsConfigured);
    let (info, _) = probed(healthy().on("RuntimeService/RuntimeConfig", driver(7))).await;
    assert_eq!(info.expect_err("unknown").to_string(), "runtime returned an unknown cgroup driver 7");
    let (info, registry) = probed(healthy().on("RuntimeService/RuntimeConfig", Answer::refused(12, "no"))).await;
    assert_eq!(info.expect("an old containerd passes").cgroup_driver, RuntimeCgroupDriver::AsConfigured);
    assert!(has_family(&registry, "kubelet_cri_losing_support"));
}

#[tokio::test]
async fn a_missing_socket_is_reported_with_the_familiar_text() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("none.sock");
    let (connection, registry) = client(&socket);
    let error = probe(&connection, &registry, Duration::ZERO).await.expect_err("nothing there");
    let path = socket.display();
    assert_eq!(
        error.to_string(),
        format!(
            "validate service connection: validate CRI v1 runtime API for endpoint \"unix://{path}\": rpc error: \
             code = Unavailable desc = connection error: desc = \"transport: Error while dialing: dial unix {path}: \
             connect: no such file or directory\""
        )
    );
}

#[tokio::test]
async fn a_socket_that_comes_late_is_waited_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let (connection, registry) = client(&dir.path().join("cri.sock"));
    let late = async {
        tokio::task::yield_now().await;
        healthy().start_at(dir).await
    };
    let (info, _running) = tokio::join!(probe(&connection, &registry, Duration::from_secs(20)), late);
    assert!(info.is_ok(), "{info:?}");
}

#[tokio::test]
async fn another_service_on_the_socket() {
    let (info, _) = probed(Server::new()).await;
    let text = info.expect_err("not a runtime").to_string();
    assert!(
        text.ends_with("rpc error: code = Unimplemented desc = unknown service runtime.v1.RuntimeService"),
        "{text}"
    );
    let (info, _) = probed(Server::new().on("RuntimeService/Version", Answer::ok(&version()))).await;
    let text = info.expect_err("no images").to_string();
    assert!(text.contains("validate CRI v1 image API for endpoint"), "{text}");
}

#[tokio::test]
async fn another_version_of_the_contract() {
    let other = cri::VersionResponse { version: "0.2.0".into(), ..version() };
    let (info, _) = probed(healthy().on("RuntimeService/Version", Answer::ok(&other))).await;
    assert_eq!(info.expect_err("not ours").to_string(), "runtime api version is not supported");
    let bare = cri::VersionResponse { runtime_name: String::new(), ..version() };
    let (info, _) = probed(healthy().on("RuntimeService/Version", Answer::ok(&bare))).await;
    let text = info.expect_err("nameless").to_string();
    assert_eq!(text, "not all fields are set in VersionResponse (missing runtime_name)");
}

#[tokio::test]
async fn a_hang_ends_with_the_deadline() {
    let running = Server::new()
        .on("RuntimeService/Version", Answer::Hang)
        .on("RuntimeService/ExecSync", Answer::Hang)
        .start()
        .await;
    let (connection, _) = client(running.socket());
    let error = connection.runtime.version("").await.expect_err("hangs");
    assert_eq!(error, CriError::TimedOut { op: "version", limit: T });
    let command = ["sleep".to_owned(), "9".to_owned()];
    let limit = Duration::from_millis(10);
    let error = connection.runtime.exec_sync("c", &command, limit, usize::MAX).await.expect_err("hangs");
    assert_eq!(error.to_string(), "command timed out: \"sleep 9\" timed out after 10ms");
}

#[tokio::test]
async fn failed_commands_report_exit_code_and_standard_error() {
    let exited = cri::ExecSyncResponse { stdout: b"out".to_vec(), stderr: b"oops".to_vec(), exit_code: 3 };
    let running = Server::new().on("RuntimeService/ExecSync", Answer::ok(&exited)).start().await;
    let (connection, _) = client(running.socket());
    let command = ["ls".to_owned(), "/x".to_owned()];
    let error = connection.runtime.exec_sync("c", &command, Duration::ZERO, usize::MAX).await.expect_err("exit 3");
    assert_eq!(error.to_string(), "command 'ls /x' exited with 3: oops");

    let fine = cri::ExecSyncResponse { stdout: b"out".to_vec(), ..Default::default() };
    let running = Server::new().on("RuntimeService/ExecSync", Answer::ok(&fine)).start().await;
    let (connection, _) = client(running.socket());
    let output = connection.runtime.exec_sync("c", &command, Duration::ZERO, usize::MAX).await;
    assert_eq!(output, Ok(ExecOutput { stdout: b"out".to_vec(), stderr: Vec::new() }));
}

#[tokio::test]
async fn pull_errors_keep_the_runtime_s_words() {
    let pull = async |answer: Answer| {
        let running = Server::new().on("ImageService/PullImage", answer).start().await;
        let (connection, _) = client(running.socket());
        let spec = cri::ImageSpec { image: "busybox:latest".into(), ..Default::default() };
        connection.images.pull_image(spec, None, None).await.map_err(|e| e.to_string())
    };
    assert_eq!(pull(Answer::refused(2, "no such host")).await, Err("no such host".to_owned()));
    assert_eq!(
        pull(Answer::refused(5, "not there")).await,
        Err("rpc error: code = NotFound desc = not there".to_owned())
    );
    let empty = Answer::ok(&cri::PullImageResponse::default());
    assert_eq!(pull(empty).await, Err("imageRef of image \"busybox:latest\" is not set".to_owned()));
    let fine = Answer::ok(&cri::PullImageResponse { image_ref: "sha256:1".into() });
    assert_eq!(pull(fine).await, Ok("sha256:1".to_owned()));
}

#[tokio::test]
async fn a_runtime_that_goes_and_comes_back_is_found_again() {
    let running = healthy().start().await;
    let (connection, _) = client(running.socket());
    connection.runtime.version("").await.expect("answers");
    let dir = running.stop();
    let error = connection.runtime.version("").await.expect_err("gone");
    assert!(error.is_unavailable(), "{error}");
    let _running = healthy().start_at(dir).await;
    // The back-off after one failure is 120 ms at most; attempts within it fail fast.
    let found = tokio::time::timeout(Duration::from_secs(10), async {
        while connection.runtime.version("").await.is_err() {
            tokio::task::yield_now().await;
        }
    });
    found.await.expect("found again");
}

#[tokio::test]
async fn events_end_with_the_stream() {
    let event = cri::ContainerEventResponse { container_id: "c1".into(), ..Default::default() };
    let running = Server::new().on("RuntimeService/GetContainerEvents", Answer::ok(&event)).start().await;
    let (connection, _) = client(running.socket());
    let seen: Vec<_> = connection.runtime.container_events().await.expect("a stream").collect().await;
    assert_eq!(seen, [Ok(event)]);
}

#[tokio::test]
async fn streamed_lists_fall_back_for_good() {
    let images = cri::ListImagesResponse { images: vec![cri::Image { id: "i".into(), size: 1, ..Default::default() }] };
    let running = Server::new().on("ImageService/ListImages", Answer::ok(&images)).start().await;
    let config = CriConfig {
        endpoint: running.socket().display().to_string(),
        image_endpoint: String::new(),
        request_timeout: T,
        list_streaming: true,
    };
    let connection = connect(&config, &Registry::new()).expect("a bare path is an endpoint");
    for _ in 0..2 {
        assert_eq!(connection.images.list_images().await.as_ref(), Ok(&images.images));
    }
    assert_eq!(running.calls("ImageService/StreamImages"), 1);
    assert_eq!(running.calls("ImageService/ListImages"), 2);
}

#[tokio::test]
async fn statistics_are_asked_for() {
    let stats = cri::ContainerStats {
        writable_layer: Some(cri::FilesystemUsage { timestamp: 7, ..Default::default() }),
        ..Default::default()
    };
    let reply = cri::ListContainerStatsResponse { stats: vec![stats.clone()] };
    let running = Server::new().on("RuntimeService/ListContainerStats", Answer::ok(&reply)).start().await;
    let (connection, registry) = client(running.socket());
    assert_eq!(connection.runtime.list_container_stats(None).await, Ok(vec![stats]));
    let error = connection.runtime.list_pod_sandbox_stats(None).await.expect_err("an older runtime");
    assert!(error.is_unimplemented(), "{error}");
    assert!(has_family(&registry, "kubelet_runtime_operations_errors_total"));
}

#[tokio::test]
async fn errors_keep_their_code() {
    let running = Server::new()
        .on("RuntimeService/StopContainer", Answer::refused(5, "no container c"))
        .on("RuntimeService/ContainerStatus", Answer::ok(&cri::ContainerStatusResponse::default()))
        .start()
        .await;
    let (connection, registry) = client(running.socket());
    let error = connection.runtime.stop_container("c", Duration::from_secs(1)).await.expect_err("refused");
    assert_eq!(error, CriError::Rpc { code: Code::NotFound, message: "no container c".into() });
    assert!(error.is_not_found());
    let error = connection.runtime.container_status("c").await.expect_err("empty");
    assert_eq!(error.to_string(), "container status is nil");
    assert!(has_family(&registry, "kubelet_runtime_operations_errors_total"));
}
