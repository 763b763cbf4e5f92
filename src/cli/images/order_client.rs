//! Sends image orders to the running runtime, or runs them on its store under the runtime's lock.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use anyhow::{Result, bail};
use tokio::sync::mpsc;

use berth_runtime::{
    config::EmbeddedConfig,
    errors::ErrorKind,
    images::{
        ImageStore,
        commands::{self, CommandResponse, Image, ImageCommand},
        control_socket::{self, CommandError},
        progress::LayerProgress,
    },
    store::Lock,
    wiring,
};

/// Attempts and their interval: a starting runtime takes the lock before it accepts orders, a stopping one releases it
/// last.
const TRIES: u32 = 20;
const BETWEEN: Duration = Duration::from_millis(250);
/// Capacity of the progress queue, in messages.
const WAITING: usize = 64;

/// Messages and final outcome of a command to the image store.
pub(super) struct OrderResult {
    responses: Vec<CommandResponse>,
    end: Option<CommandResponse>,
}

impl OrderResult {
    /// Whether the order failed because the image does not exist.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.end, Some(CommandResponse::Failed(true, _)))
    }

    /// All messages but progress, if the order succeeded.
    pub(super) fn responses(self) -> Result<Vec<CommandResponse>> {
        match self.end {
            Some(CommandResponse::Failed(_, text)) => bail!(text),
            _ => Ok(self.responses),
        }
    }

    /// Success, or the error of the order.
    pub(super) fn done(self) -> Result<()> {
        self.responses().map(drop)
    }

    /// All images in the messages, if the order succeeded.
    pub(super) fn images(self) -> Result<Vec<Image>> {
        let image = |response| match response {
            CommandResponse::Image(image) => Some(*image),
            _ => None,
        };
        Ok(self.responses()?.into_iter().filter_map(image).collect())
    }

    fn receive(&mut self, response: CommandResponse, show: &mut impl FnMut(Vec<LayerProgress>)) {
        match response {
            CommandResponse::Progress(shown) => show(shown),
            end @ (CommandResponse::Done | CommandResponse::Failed(..)) => self.end = Some(end),
            other => self.responses.push(other),
        }
    }
}

/// Runs an order; `show` is called with its progress.
pub(super) async fn run_order(
    config: &EmbeddedConfig,
    order: ImageCommand,
    file: Option<File>,
    mut show: impl FnMut(Vec<LayerProgress>),
) -> Result<OrderResult> {
    let folder = control_socket::folder(&config.state);
    let mut answer = OrderResult { responses: Vec::new(), end: None };
    let mut refusal = None;
    for _ in 0..TRIES {
        let asked = control_socket::send_command(&folder, &order, file.as_ref().map(File::as_fd), |word| {
            answer.receive(word, &mut show)
        })
        .await;
        match asked {
            Ok(()) => return Ok(answer),
            Err(CommandError::NotRunning { .. }) => {}
            Err(CommandError::Refused { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                bail!("permission denied: only root can manage the images of the runtime");
            }
            Err(error) => return Err(error.into()),
        }
        match wiring::images_alone(config).await {
            Ok((lock, store)) => return run_locally(lock, &store, order, file.map(OwnedFd::from), answer, show).await,
            Err(error) if error.kind == ErrorKind::Unavailable => refusal = Some(error),
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(BETWEEN).await;
    }
    match refusal {
        Some(error) => bail!("{error}, and its control socket does not accept requests"),
        None => bail!("cannot connect to the control socket of the runtime"),
    }
}

async fn run_locally(
    lock: Lock,
    store: &ImageStore,
    order: ImageCommand,
    file: Option<OwnedFd>,
    mut answer: OrderResult,
    mut show: impl FnMut(Vec<LayerProgress>),
) -> Result<OrderResult> {
    let (sender, mut receiver) = mpsc::channel(WAITING);
    let work = async move {
        let outcome = commands::execute(store, order, file, &sender).await;
        // Received below until this future ends.
        let _ = sender.send(commands::final_response(outcome)).await;
    };
    let receiving = async {
        while let Some(response) = receiver.recv().await {
            answer.receive(response, &mut show);
        }
        answer
    };
    let ((), answer) = futures::join!(work, receiving);
    store.collect().await?;
    drop(lock);
    Ok(answer)
}
