//! Leak tests: count file descriptors and tokio tasks of a process that runs a single test.

use std::{fs, process::Command, time::Duration};

use tokio::{runtime, time};

/// Environment variable that marks the process in which the test runs alone.
const ALONE: &str = "BERTH_TEST_ALONE";
/// Deadline for released resources to disappear.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a test, by its path, in a process of its own: parallel tests would change the counts.
pub fn run_alone<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F) {
    if std::env::var_os(ALONE).is_some() {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        return runtime.expect("failed to build the tokio runtime").block_on(body());
    }
    let mut alone = Command::new(std::env::current_exe().expect("failed to find the test binary"));
    alone.args(["--exact", test, "--nocapture"]).env(ALONE, "1");
    let output = alone.output().expect("failed to run the test binary");
    let stdout = String::from_utf8_lossy(&output.stdout);
    println!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{test}: {}", output.status);
}

/// Number of file descriptors and tokio tasks of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResourceCounts {
    descriptors: usize,
    tasks: usize,
}

impl ResourceCounts {
    /// Counts them now.
    pub fn now() -> Self {
        let descriptors = fs::read_dir("/proc/self/fd").expect("failed to read /proc/self/fd").count();
        Self { descriptors, tasks: runtime::Handle::current().metrics().num_alive_tasks() }
    }

    /// Waits until the counts have returned to at most these plus `give_or_take` and `has_settled` returns true.
    ///
    /// # Panics
    /// The deadline passed.
    pub async fn until_settled(self, give_or_take: usize, has_settled: impl Fn() -> bool) {
        let until = async {
            loop {
                let now = Self::now();
                let is_more =
                    now.descriptors > self.descriptors + give_or_take || now.tasks > self.tasks + give_or_take;
                if !is_more && has_settled() {
                    return;
                }
                time::sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(time::timeout(LIMIT, until).await.is_ok(), "{:?}, before: {self:?}", Self::now());
    }
}
