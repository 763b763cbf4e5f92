//! A pod of the demo image and the built-in image: nothing is pulled, nothing is installed.
//!
//! Needs root, and the programs of the shim and of the demo image; a skipped test reports so.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use berth_proto::cri;

use berth_testkit::{
    embedded::{
        fixture::{RuntimeFixture, obstacle},
        in_process::{Builtin, container, daemon_with, pod},
    },
    reservation::free_ports,
};

/// Upper limit of anonymous memory of a paused container, KiB: memory that it does not share with others of its image.
const MOST_ANONYMOUS: u64 = 600;

fn of_image(name: &str, image: &str, command: &[&str]) -> cri::ContainerConfig {
    cri::ContainerConfig {
        image: Some(cri::ImageSpec { image: image.to_owned(), ..Default::default() }),
        command: command.iter().map(ToString::to_string).collect(),
        ..container(name, "")
    }
}

/// Program of the demo image, as a build of the workspace leaves it.
fn demo_program() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_berth")).with_file_name("berth-demo")
}

/// Makes the archive of the demo image as `make run` does.
fn demo_archive(place: &Path) -> PathBuf {
    let archive = place.join("demo.tar");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/demo/image.sh");
    let made = Command::new(script).arg(demo_program()).arg(&archive).output().expect("there is a shell");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    archive
}

fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn kilobytes(pid: &str, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    line.trim_matches([':', '\t', ' ']).trim_end_matches(" kB").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_built_in_images_serves_logs_executes_and_is_small() {
    let no_demo = || (!demo_program().is_file()).then(|| "needs a build of berth-demo".to_owned());
    if let Some(why) = obstacle().filter(|why| !why.contains("busybox")).or_else(no_demo) {
        assert!(std::env::var_os("CI").is_none(), "may not be skipped on CI: {why}");
        println!("skipped a_pod_of_built_in_images_serves_logs_executes_and_is_small: {why}");
        return;
    }
    let place = RuntimeFixture::new();
    let daemon = daemon_with(place.path(), Builtin::Made).await;
    daemon.images.import(&demo_archive(place.path()), None).await.expect("imported");
    let sandbox = daemon.run(pod(place.path(), "demo")).await;
    let [port] = free_ports();
    let command = ["/bin/httpd", &format!(":{port}")];
    let web = daemon.start(&sandbox, of_image("web", "berth.local/demo", &command)).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    let answer = loop {
        match get(port, "/healthz") {
            Some(answer) => break answer,
            None => assert!(Instant::now() < deadline, "no response: {:?}", daemon.status(&web).await),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer:?}");
    let (out, code) = daemon.exec(&web, "id; echo $HOME; exit 7").await;
    assert!(out.contains("uid=0") && code == 7, "{out:?} {code}");
    let log = fs::read_to_string(daemon.status(&web).await.log_path).expect("a log");
    assert!(log.contains(&format!(" stdout F httpd: listening on [::]:{port}\n")), "{log:?}");
    // AC-09-E7's other half: memory of a pod besides its shim.
    let pause = daemon.start(&sandbox, of_image("pause", "berth.local/pause:latest", &[])).await;
    let rpc = daemon.calls.rpc.clone();
    let request = cri::ContainerStatusRequest { container_id: pause.clone(), verbose: true };
    let info = rpc.clone().container_status(request).await.expect("known").into_inner().info;
    let info: serde_json::Value = serde_json::from_str(&info["info"]).expect("JSON");
    let pid = info["pid"].to_string();
    let memory = ["RssAnon", "VmRSS"].map(|field| kilobytes(&pid, field));
    println!("pause holds {} KiB of its own, {} KiB in all", memory[0], memory[1]);
    assert!(memory[0] <= MOST_ANONYMOUS, "{memory:?}");
    // Both exit on the stop signal, long before the grace period ends.
    let begun = Instant::now();
    for (id, expected) in [(pause, 0), (web, 143)] {
        let request = cri::StopContainerRequest { container_id: id.clone(), timeout: 20 };
        daemon.calls.rpc.clone().stop_container(request).await.expect("stops");
        assert_eq!(daemon.exited(&id).await.exit_code, expected);
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    daemon.remove(&sandbox).await;
    place.assert_clean();
    daemon.stop.cancel();
}
