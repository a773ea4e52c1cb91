// Search of the site read from disk: there a browser starts no workers from files, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each)
      }
      this.load(address).then(() => {
        this.waiting.forEach(data => this.hand(data))
        this.waiting = null
      })
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.hand(data)
    }

    hand(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }

    load(address) {
      const script = this.inside.document.createElement("script")
      script.src = address
      return new Promise((loaded, failed) => {
        script.onload = loaded
        script.onerror = () => failed(new Error(`${address} could not be loaded`))
        this.inside.document.body.append(script)
      })
    }
  }
  const ofBrowser = window.Worker // starts from what a page has made itself, also there
  window.Worker = function (address) {
    return new (String(address).startsWith("blob:") ? ofBrowser : window.IFrameWorker)(address)
  }
}
